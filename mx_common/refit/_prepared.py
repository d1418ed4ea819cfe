"""What a receiver keeps from one version to the next: where boxes land, and which reads fill them.

    planned = Planner(job, engine).plan(table, lambda: [0] * len(table.agents))

The layout is kept while the trainer's tensors, their boxes and the wish of this engine are the same, the plan while the addresses are too.
Invariant: what is kept is used only for a table with equal signatures, so a trainer that restarts elsewhere, or with another parallel
layout, is planned anew without restarting anything here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mx_common.errors import CoverageError, ManifestMismatch
from mx_common.refit._landing import Layout, reshard_layout, staged_layout
from mx_common.refit.engine import RefitEngine, RefitJob
from mx_common.refit.plan import PULL_BYTES, Plan, make_plan
from mx_common.refit.table import ShardTable

__all__ = ["Planned", "Planner"]


@dataclass(frozen=True)
class Planned:
    """A layout and one plan a round of it. `minimum_bytes`: what this rank's layout needs; `choice`: bytes read exactly, and as whole row
    blocks; `verified`: whether every byte is compared with a published digest."""

    layout: Layout
    plans: tuple[Plan, ...]
    minimum_bytes: int
    choice: dict[str, int]
    verified: bool

    @property
    def wire_bytes(self) -> int:
        """Bytes that cross the wire."""
        return sum(plan.wire_bytes for plan in self.plans)

    def slots(self, table: ShardTable) -> list[str]:
        """The slots of `table` that are read from, in its order."""
        return [table.agents[row].slot for row in sorted({row for plan in self.plans for row in plan.agents})]

    def pull_staging(self, bound: int) -> int:
        """Bytes of staging that pulls need at a time, at most `bound` where single pulls allow it."""
        largest = max((int(plan.pulls.nbytes.max()) for plan in self.plans if len(plan.pulls)), default=0)
        return max(largest, min(bound, max((plan.staging_bytes for plan in self.plans), default=0)))


class Planner:
    """Plans for one receiver. `release`: called before the memory of a new layout is taken, to give back what holds that of the old one."""

    def __init__(self, job: RefitJob, engine: RefitEngine, release: Callable[[], None] = lambda: None) -> None:
        self._job, self._engine, self._release = job, engine, release
        self._layout_key: object = None
        self._layout: Layout | None = None
        self._plan_key: object = None
        self._plans: tuple[Plan, ...] = ()

    def plan(self, table: ShardTable, prefer: Callable[[], Sequence[int]]) -> Planned:
        """`prefer`: rank of each agent among equal holders, asked when a plan is made: it holds as long as the plan does. Raises
        ManifestMismatch and CoverageError for a version that this engine cannot be filled from."""
        live = {name: (t.data_ptr(), t.nbytes) for name, t in self._engine.parameters().items()}
        key = (table.layout_signature(), sorted(live.items()))
        if self._layout is None or key != self._layout_key:
            self._layout = None  # the old layout's memory is given back before the new one's is taken
            self._plan_key = None
            self._release()
            table.check()
            self._layout, self._layout_key = self._new_layout(table), key
        verified = self._job.verify and bool((np.diff(table.digest_offset) > 0).all())
        plan_key = (table.address_signature(), verified)
        if plan_key != self._plan_key:
            order = np.array(prefer(), dtype=np.int64)
            largest = min(PULL_BYTES, self._job.staging_bytes // 2)
            self._plans = tuple(
                make_plan(table, r.pieces, preference=order, verify=verified, pull_bytes=largest) for r in self._layout.rounds
            )
            self._plan_key = plan_key
        choice: dict[str, int] = {}
        for plan in self._plans:
            for kind, nbytes in plan.choice.items():
                choice[kind] = choice.get(kind, 0) + nbytes
        return Planned(self._layout, self._plans, self._layout.minimum_bytes, choice, verified)

    def forget(self) -> None:
        """Keep nothing for the next version."""
        self._layout = self._layout_key = self._plan_key = None
        self._plans = ()

    def _new_layout(self, table: ShardTable) -> Layout:
        import torch

        job = self._job
        facts = {}
        for row, name in enumerate(table.names):
            if job.wanted is not None and not job.wanted(name):
                continue
            dtype = getattr(torch, table.dtype[row], None)
            if not isinstance(dtype, torch.dtype):
                raise ManifestMismatch(f"{name} has dtype {table.dtype[row]!r}, which this torch does not know")
            facts[name] = (tuple(int(n) for n in table.shape[row, : table.ndim[row]]), dtype)
        if not facts:
            raise CoverageError(
                f"none of the {len(table.names)} tensors that the trainer publishes of {job.model_name} is wanted; check the name patterns"
            )
        device = next((tensor.device for tensor in self._engine.parameters().values()), None)
        if device is None:
            raise CoverageError(
                f"the engine that should take over {job.model_name} has no parameters; refit it after it has loaded"
            )
        make = staged_layout if job.path == "staged" else reshard_layout
        return make(self._engine.capture(facts), facts, self._engine, job, device)
