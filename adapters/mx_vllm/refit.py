"""vLLM's weight-transfer backend `mx`: a running engine takes over versions that a trainer publishes.

    vllm serve MODEL --weight-transfer-config '{"backend": "mx"}'

One update is vLLM's own sequence, over HTTP (`VLLM_SERVER_DEV_MODE=1`) or in Python: init once, then start, update, finish. `update`
prepares a version on every rank, and `finish` writes it; a rank that cannot prepare makes vLLM skip `finish` on all of them. See
`mx_vllm.drive` for the sequence in one call.

Invariant: between `update` and `finish` the weights that serve are untouched, unless MX_REFIT_SHADOW or the staging bound left no room.
"""

from __future__ import annotations

import fnmatch
import logging
import uuid
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger

from mx_common.errors import ConfigError, RefitFailed, WeightsBroken
from mx_common.refit.engine import RefitJob
from mx_common.refit.receiver import Ready, Receiver
from mx_vllm._logging import speak_through_vllm
from mx_vllm._version import check_version
from mx_vllm.refit_model import VllmRefit

__all__ = ["MxInit", "MxUpdate", "MxWeightTransfer"]

log: logging.Logger = init_logger("vllm.mx")

Said = tuple[str, bool, "int | None"]
"""Of one rank: why it could not prepare, or ""; whether its weights are mixed; the version it prepared."""


@dataclass
class MxInit(WeightTransferInitInfo):
    """`model_name`: what the trainer publishes under ("": the engine's model). `path`: reshard or staged. `only`: patterns of checkpoint
    names to refit (`*.experts.*`); none: all. `server`: the directory ("": `MX_SERVER_ADDRESS`, else the embedded one)."""

    model_name: str = ""
    path: str = "reshard"
    server: str = ""
    only: list[str] = field(default_factory=list)


@dataclass
class MxUpdate(WeightTransferUpdateInfo):
    """`version`: the number the trainer published, none for the newest. `timeout`: seconds to wait until it is READY."""

    version: int | None = None
    timeout: float | None = None


class MxWeightTransfer(WeightTransferEngine[MxInit, MxUpdate]):
    """One worker's end. Raises UnsupportedVersion for another vLLM, when the engine starts."""

    init_info_cls = MxInit
    update_info_cls = MxUpdate
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        speak_through_vllm()
        check_version(vllm.__version__)
        super().__init__(config, vllm_config, device, model)
        self._receiver: Receiver | None = None
        self._ready: Ready | None = None
        self._settings: MxInit | None = None

    def init_transfer_engine(self, init_info: MxInit) -> None:
        """Once, and again to change a setting; with the same settings it keeps what it has."""
        if self._receiver is not None and init_info == self._settings:
            return
        self.shutdown()
        self._settings = init_info
        parallel = self.parallel_config
        only = list(init_info.only)
        job = RefitJob(
            model_name=init_info.model_name or self.model_config.model,
            worker_id=uuid.uuid4().hex,
            path=init_info.path,
            rank=parallel.rank,
            world=parallel.world_size,
            engine="vllm",
            server=init_info.server,
            wanted=(lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in only)) if only else None,
        )
        self._receiver = Receiver(job, VllmRefit(self.vllm_config, self.model_config, self.device, self.model), log)

    def start_weight_update(self) -> None:
        """What an update that was never finished prepared is forgotten."""
        self._ready = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """vLLM's entry; its own version synchronises an accelerator, which a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: MxUpdate) -> None:
        """Prepare a version on this rank. When a rank cannot, or has another version than the others, none of them installs.

        The last rank alone raises, for all: of several errors vLLM 0.32 reads the first, and takes the rest for answers to its next calls.
        The session of the other ranks stays open until `finish_weight_update`, which then installs nothing.
        """
        if self._receiver is None:
            raise ConfigError(
                "the weight-transfer backend mx is not initialised: call init_weight_transfer_engine once, before updates"
            )
        self._ready = ready = None
        error: Exception | None = None
        try:
            ready = self._receiver.prepare(update_info.version, update_info.timeout)
        except Exception as raised:  # the other ranks wait to hear of it, whatever it is
            error = raised
        answers = self._of_all_ranks((_text(error), isinstance(error, WeightsBroken), ready.facts.version if ready else None))
        self._raise_together(answers, error)
        versions = {version for _, _, version in answers}
        if any(text for text, _, _ in answers):
            return
        if len(versions) == 1:
            self._ready = ready
        elif self.parallel_config.rank == self.parallel_config.world_size - 1:
            raise RefitFailed(
                f"the ranks found different versions ({versions}) while one was published; ask again, or for one by number"
            )

    def _of_all_ranks(self, said: Said) -> list[Said]:
        """What each rank of this engine said, in the order of ranks."""
        world = self.parallel_config.world_size
        answers = [said] * world
        if world > 1:
            torch.distributed.all_gather_object(answers, said, group=get_world_group().cpu_group)
        return answers

    def finish_weight_update(self) -> None:
        """Install what was prepared. When a rank fails half-way its weights are mixed, it serves nothing, and the last rank raises
        WeightsBroken; call it once more then, which only ends vLLM's session."""
        ready, self._ready = self._ready, None
        if ready is None:
            log.warning("finish_weight_update with no version prepared: the weights are as they were")
            return
        error: Exception | None = None
        try:
            ready.install()
        except Exception as raised:  # as in receive_weights
            error = raised
        self._raise_together(self._of_all_ranks((_text(error), error is not None, None)), error)

    def _raise_together(self, answers: list[Said], error: Exception | None) -> None:
        """On the last rank, what the first rank that failed said."""
        failed = [(rank, text, broken) for rank, (text, broken, _) in enumerate(answers) if text]
        if failed and self.parallel_config.rank == self.parallel_config.world_size - 1:
            rank, text, _ = failed[0]
            kind = WeightsBroken if any(broken for _, _, broken in failed) else RefitFailed
            raise kind(f"rank {rank}: {text}" if len(answers) > 1 else text) from error

    def shutdown(self) -> None:
        """Give the transport and the memory back; idempotent."""
        receiver, self._receiver, self._ready = self._receiver, None, None
        if receiver is not None:
            receiver.close()


def _text(error: Exception | None) -> str:
    return "" if error is None else str(error) or type(error).__name__
