"""Publishes the weights of a Megatron trainer, version by version, from any training loop.

    publisher = MegatronPublisher.create(model, "path/to/config.json", model_name="org/model")     # on every rank
    publisher.guard(optimizer)               # its steps wait for readers, bounded
    publisher.publish(0)                     # on every rank, the same number
    for step in range(1, steps + 1):
        train_step(model, optimizer)
        publisher.publish(step)

Invariant: what is published is what the next forward pass would use, also while Megatron still gathers parameters in the background; and
a rank whose description fails stops all of them with the reason, rather than leave the others waiting.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mx_common import envs
from mx_common.errors import ConfigError
from mx_common.refit.held import Held
from mx_megatron.families import Layout
from mx_megatron.layout import Ranks
from mx_megatron.model import Copies, chunks_of, held_tensors, layout_of, ranks_now

__all__ = ["MegatronPublisher", "Sink"]


class Sink(Protocol):
    """What takes this rank's boxes: `mx_common.refit.publisher.Publisher`."""

    def publish(self, version: int, held: Sequence[Held]) -> Any: ...

    def before_update(self) -> bool: ...

    def close(self) -> None: ...


class MegatronPublisher:
    """This rank's part of every version. `sink` is None on a rank that publishes nothing because another holds the same.

    `replicas` and `leave_out` are those of `held_tensors`. Make it after the model is wrapped, and call `publish` on every rank: with
    `overlap_param_gather` it begins with a collective."""

    def __init__(
        self,
        model: Any,
        layout: Layout,
        sink: Sink | None,
        *,
        ranks: Ranks | None = None,
        replicas: bool = False,
        leave_out: Sequence[str] = (),
    ) -> None:
        self.layout, self.ranks, self.copies = layout, ranks or ranks_now(), Copies()
        self._chunks, self._sink = chunks_of(model), sink
        self._replicas, self._leave_out = replicas, tuple(leave_out)
        self._held: list[Held] = []
        self._addresses: tuple[int, ...] = ()

    @classmethod
    def create(
        cls,
        model: Any,
        hf_config: Mapping[str, Any] | str | Path,
        *,
        model_name: str = "",
        server: str = "",
        mode: str = "",
        replicas: bool = False,
        leave_out: Sequence[str] = (),
        opener: Callable[..., Sink] | None = None,
    ) -> MegatronPublisher:
        """With a publisher of its own, whose slot is `rank<global rank>`. Collective over all ranks of the trainer.

        `hf_config`: config.json of the Hugging Face model. `model_name`: what engines ask for (else `MX_MODEL_NAME`). Raises ConfigError on
        every rank when one of them holds what cannot be published."""
        name = model_name or envs.MODEL_NAME.get()
        problem: Exception | None = None
        parts = 0
        made: MegatronPublisher | None = None
        try:
            if not name:
                raise ConfigError("no name to publish under; give model_name (--mx-model-name), or set MX_MODEL_NAME")
            layout = layout_of(hf_config, model)
            made = cls(model, layout, None, replicas=replicas, leave_out=leave_out)
            parts = len(made.held())
        except Exception as why:  # whatever it is: the other ranks wait in the exchange
            problem = why
        rank, told = _exchanged({"problem": _said(problem), "parts": parts, "run": uuid.uuid4().hex})
        if wrong := [f"rank {r}: {one['problem']}" for r, one in enumerate(told) if one["problem"]]:
            raise ConfigError(f"{len(wrong)} of {len(told)} ranks cannot publish. {wrong[0]}") from problem
        assert made is not None
        if parts:
            slots = [f"rank{r}" for r, one in enumerate(told) if one["parts"]]
            made._sink = (opener or _publisher)(name, f"rank{rank}", slots, run=told[0]["run"], server=server, mode=mode)
        return made

    def held(self) -> list[Held]:
        """This rank's boxes now. Described again only when a parameter has moved; copies are always made again."""
        addresses = tuple(parameter.data_ptr() for chunk in self._chunks for parameter in chunk.parameters())
        if addresses != self._addresses or len(self.copies):
            self._held = held_tensors(
                self._chunks, self.layout, self.ranks, replicas=self._replicas, leave_out=self._leave_out, copies=self.copies
            )
            self._addresses = addresses
        return self._held

    def publish(self, version: int) -> Any:
        """Publish this rank's part of `version`; what the publisher returned, or None on a rank that publishes nothing. Raises MxError."""
        self.before_update()
        for chunk in self._chunks:
            _gather_parameters(chunk)
        return None if self._sink is None else self._sink.publish(version, self.held())

    def before_update(self) -> bool:
        """To be called before parameters are overwritten: waits, bounded, for readers of the published version. Whether all were done."""
        return True if self._sink is None else self._sink.before_update()

    def guard(self, optimizer: Any) -> Callable[[], None]:
        """Make `optimizer.step` wait for readers first: they may read during forward and backward passes. Returns what undoes it."""
        step = optimizer.step

        def step_after_readers(*args: Any, **kwargs: Any) -> Any:
            self.before_update()
            return step(*args, **kwargs)

        had = vars(optimizer).get("step")
        optimizer.step = step_after_readers

        def undo() -> None:
            if had is None:
                del optimizer.step
            else:
                optimizer.step = had

        return undo

    def close(self) -> None:
        """Withdraw what is published and give memory back, once its readers are done (bounded)."""
        if self._sink is not None:
            self._sink.close()

    def __enter__(self) -> MegatronPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _said(problem: Exception | None) -> str:
    if problem is None or isinstance(problem, ConfigError):
        return str(problem or "")
    return f"{type(problem).__name__}: {problem}"


def _publisher(*args: Any, **kwargs: Any) -> Sink:
    from mx_common.refit.publisher import Publisher

    return Publisher(*args, framework="megatron", outage="warn", **kwargs)


def _exchanged(mine: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """This rank and what every rank said."""
    from torch import distributed

    if not distributed.is_initialized():
        return 0, [mine]
    told: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(told, mine)
    return distributed.get_rank(), told


def _gather_parameters(chunk: Any) -> None:
    """Finish what the distributed optimizer overlaps with the next forward pass; until then ranks hold old values of others' shards."""
    settings = getattr(chunk, "ddp_config", None)
    if getattr(settings, "overlap_param_gather", False):
        chunk.start_param_sync(force_sync=True)
