"""`MxPublish`: publish from a training loop that one writes oneself.

    mx = MxPublish(model, "org/model", every=10)
    ...
    mx.before_step()            # on every rank, before optimizer.step(): readers of the last version are done, or their time is up
    optimizer.step()
    mx.publish(step)            # on every rank, after it; does nothing unless `step` is a multiple of `every`
    ...
    mx.close()

Invariant: all ranks of the process group make the same calls. The first publish is a collective, later ones are not: receivers wait for
every rank that holds something, the trainer waits for none. A rank whose own publisher could not be made then tries again at the next
publish, without the others.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mx_common.errors import ConfigError
from mx_fsdp.layout import held_tensors

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from mx_common.refit.held import Held
    from mx_common.refit.publisher import Published, Publisher

__all__ = ["MxPublish"]


class MxPublish:
    """Publishes versions of `model` under `model_name`, the name receivers ask for.

    `server`: the directory, `MX_SERVER_ADDRESS` unless given. `every`: publish steps that are multiples of it. `mode`: `in_place`
    (readers read the shards themselves) or `snapshot` (a copy), `MX_PUBLISH_MODE` unless given. `rename` and `replicas` as in
    `held_tensors`. `process_group`: the ranks that together hold the model, all unless given. Raises ConfigError.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        model_name: str,
        *,
        server: str = "",
        every: int = 1,
        mode: str = "",
        rename: Callable[[str], str | None] | None = None,
        replicas: bool = False,
        process_group: ProcessGroup | None = None,
        log: logging.Logger | None = None,
    ) -> None:
        if not model_name:
            raise ConfigError("a publisher needs a model_name, the one that receivers ask for")
        if every < 1:
            raise ConfigError(f"every={every}: publish every step with 1, every tenth with 10")
        if mode not in ("", "in_place", "snapshot"):
            raise ConfigError(f"publish mode {mode!r}: use in_place or snapshot")
        self.model, self.model_name, self.server, self.every, self.mode = model, model_name, server, every, mode
        self._rename, self._replicas = rename, replicas
        self._group = process_group
        self._log = log or logging.getLogger(__name__)
        self._publisher: Publisher | None = None
        self._slots: tuple[str, ...] = ()
        self._run = ""

    def before_step(self) -> bool:
        """Wait, `MX_PUBLISH_WAIT_SECONDS` at most, for readers of what the optimizer is about to overwrite. Whether all were done."""
        return True if self._publisher is None else self._publisher.before_update()

    def publish(self, step: int) -> Published | None:
        """Publish this rank's part as version `step`. None when the step is not due, and on a rank that holds nothing.

        Raises ConfigError (see `held_tensors`), also when the layout has changed so that another rank must publish, and whatever else the
        directory and the transport raise; training may go on after those.
        """
        if step % self.every:
            return None
        rank, _ = self._rank_and_world()
        held, problem = self._held(rank)
        if not self._slots:
            self._agree(bool(held), problem)
        if problem is not None:
            raise problem
        if self._publisher is None and f"rank{rank}" in self._slots:
            self._publisher = self._made(rank)
        if self._publisher is None:
            if held:
                raise ConfigError(
                    f"rank {rank} held nothing at the first publish and does now ({held[0].name}); after a change of layout close this "
                    "MxPublish and make a new one, on every rank"
                )
            return None
        return self._publisher.publish(step, held)

    def close(self) -> None:
        """Withdraw the last version once its readers are done (bounded). The object may publish again, which opens it anew."""
        publisher, self._publisher, self._slots = self._publisher, None, ()
        if publisher is not None:
            publisher.close()

    def __enter__(self) -> MxPublish:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _held(self, rank: int) -> tuple[list[Held], ConfigError | None]:
        try:
            return held_tensors(self.model, self._rename, rank=rank, replicas=self._replicas), None
        except ConfigError as error:
            return [], error

    def _agree(self, holds: bool, problem: ConfigError | None) -> None:
        """Settle, once, on who publishes and on a name for this start of the trainer. A rank may know of others' parts only what its own
        meshes tell, and nothing but a message can carry the name, so this is one small all-gather. A rank with a problem takes part: the
        others would wait for it."""
        _, world = self._rank_and_world()
        answers: list[Any] = [(holds, uuid.uuid4().hex, "" if problem is None else str(problem))] * world
        if world > 1:
            from torch import distributed

            distributed.all_gather_object(answers, answers[0], group=self._group)
        if problem is not None:
            raise problem
        for other, (_, _, said) in enumerate(answers):
            if said:
                raise ConfigError(f"rank {other} cannot publish: {said}")
        slots = tuple(f"rank{r}" for r in range(world) if answers[r][0])
        if not slots:
            raise ConfigError(f"no rank holds anything of {self.model_name}; does rename leave every tensor out?")
        self._slots, self._run = slots, answers[0][1]

    def _made(self, rank: int) -> Publisher:
        from mx_common.refit.publisher import Publisher

        return Publisher(
            self.model_name,
            f"rank{rank}",
            self._slots,
            run=self._run,
            server=self.server,
            mode=self.mode,
            framework="fsdp",
            outage="warn",
            log=self._log,
        )

    def _rank_and_world(self) -> tuple[int, int]:
        from torch import distributed

        if not (distributed.is_available() and distributed.is_initialized()):
            return 0, 1
        rank = distributed.get_rank(self._group)
        if rank < 0:
            raise ConfigError("this rank is not in the process group given; make an MxPublish only on the ranks that are")
        return rank, distributed.get_world_size(self._group)
