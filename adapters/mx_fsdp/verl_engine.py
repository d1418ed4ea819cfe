"""verl: the checkpoint engine `mx`.

    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=mx_fsdp.verl_engine
    actor_rollout_ref.rollout.checkpoint_engine.backend=mx
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.mx.server=10.0.0.7:8001

verl gathers each full tensor on every actor rank and hands it to the engine. Every rank keeps its share of them, so that an update costs a
rank 1/N of the model, and publishes that; rollout workers read all shares and hand full tensors to verl.

Invariant: all actor ranks are given the same tensors in the same order, which decides who keeps what without a message.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from mx_common.errors import ConfigError
from mx_common.refit.held import Held

if TYPE_CHECKING:
    import torch

    from mx_common.refit.publisher import Publisher

__all__ = ["MxCheckpointEngine"]

_Weights = Iterable[tuple[str, "torch.Tensor"]] | AsyncIterator[tuple[str, "torch.Tensor"]]


@CheckpointEngineRegistry.register("mx")
class MxCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One rank's end. `bucket_size` and `is_master` are verl's and not needed. `model_name`: made up by the first actor unless given.
    `server`: the directory, `MX_SERVER_ADDRESS` unless given. `device`: where shares are kept ("cpu"), else where verl's tensors lie."""

    def __init__(
        self, bucket_size: int = 0, is_master: bool = False, *, model_name: str = "", server: str = "", device: str = ""
    ) -> None:
        self._run = uuid.uuid4().hex
        self._model_name, self._server, self._device = model_name or f"verl-{self._run}", server, device
        self._rank, self._world, self._version = -1, 0, 0
        self._shares: dict[str, torch.Tensor] = {}
        self._publisher: Publisher | None = None
        self._published_as: tuple[Any, ...] = ()

    def prepare(self) -> dict[str, Any]:
        """What the first actor says holds for all: the name of the model, of this start of the trainer, and the last version."""
        return {"model_name": self._model_name, "run": self._run, "version": self._version}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of `init_process_group`: one list entry per actor rank, and per rollout worker (rank -1)."""
        first = metadata[0]
        common = {"model_name": first["model_name"], "run": first["run"], "version": first["version"] + 1}

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            spread = {name: [value] * len(ranks) for name, value in common.items()}
            return {"rank": ranks, "world_size": [actor_wg_world_size] * len(ranks), **spread}

        return arguments(list(range(actor_wg_world_size))), arguments([-1] * rollout_world_size)

    def init_process_group(self, *, rank: int, world_size: int, model_name: str, run: str, version: int) -> None:
        """`version`: one more than the last, for an update to which verl gives no global step. No process group is made."""
        self._rank, self._world, self._model_name, self._run = rank, world_size, model_name, run
        self._version = version

    def finalize(self) -> None:
        """After an update. Shares and their registration are kept for the next one."""

    def close(self) -> None:
        """Withdraw what is published and give the shares back."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()
        self._shares = {}

    async def send_weights(self, weights: _Weights, global_steps: int | None = None) -> None:
        """Actor: publish this rank's share of `weights` as version `global_steps`. Raises ConfigError on a rollout worker, and what the
        publisher raises."""
        if self._rank < 0:
            raise ConfigError("send_weights is for actor ranks; this engine was given no rank by init_process_group")
        version = self._version if global_steps is None else global_steps
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.before_update)
        loads = [0] * self._world
        shares: dict[str, torch.Tensor] = {}
        async for name, tensor in _each(weights):  # every rank takes part to the end: producing a tensor is a collective
            owner = loads.index(min(loads))
            loads[owner] += tensor.nbytes
            if owner == self._rank:
                shares[name] = self._kept(name, tensor)
        self._shares, self._version = shares, version
        slots = tuple(f"rank{rank}" for rank, load in enumerate(loads) if load)
        if f"rank{self._rank}" not in slots:
            return
        held = [Held(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in shares.items()]
        await asyncio.to_thread(self._open(slots).publish, version, held)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Rollout: the full tensors of that version, verified; each is valid until the next is asked for."""
        from mx_common.refit import receive_full

        version = self._version if global_steps is None else global_steps
        tensors = iter(receive_full(self._model_name, self._server, version))
        try:
            while (item := await asyncio.to_thread(next, tensors, None)) is not None:
                yield item
        finally:  # verl may stop early; the lease ends with the iterator
            if (stop := getattr(tensors, "close", None)) is not None:
                await asyncio.to_thread(stop)

    def _kept(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of our own, in the memory of the last version where it fits: addresses stay, so plans and registrations do."""
        import torch

        device = torch.device(self._device) if self._device else tensor.device
        share = self._shares.get(name)
        if share is None or (share.shape, share.dtype, share.device) != (tensor.shape, tensor.dtype, device):
            share = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return share.copy_(tensor.detach())

    def _open(self, slots: tuple[str, ...]) -> Publisher:
        from mx_common.refit.publisher import Publisher

        published_as = (self._model_name, self._run, slots)
        if self._publisher is not None and self._published_as != published_as:  # other actors, or another number of them
            self._publisher.close()
            self._publisher = None
        if self._publisher is None:
            self._publisher = Publisher(
                self._model_name, f"rank{self._rank}", slots, run=self._run, server=self._server, mode="in_place"
            )
            self._published_as = published_as
        return self._publisher


async def _each(weights: _Weights) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """verl gives a generator or an async one."""
    if isinstance(weights, AsyncIterator):
        async for item in weights:
            yield item
    else:
        for item in weights:
            yield item
