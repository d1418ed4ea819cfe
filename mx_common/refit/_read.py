"""Carries out a plan: reads from every agent at once, digests, and the copies out of staging.

    reader = Reader("receiver-7", open_transport)
    reader.attach(memory, table.agents)                   # registers and connects what is new
    reader.run(plan, table, wire, seconds, verify=True)   # returns when every byte is where it belongs and is what was published

Invariant: `run` raises before a digest that differs is followed by another read of its round; after an error the transports are given up by
`reset`, since only its end stops late writes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from mx_common import envs
from mx_common._timed import Stages, timed
from mx_common.errors import DigestMismatch, TransferTimeout
from mx_common.load.tensors import some_names
from mx_common.refit._lanes import Lanes
from mx_common.refit._memory import Memory
from mx_common.refit._verify import differing
from mx_common.refit.plan import Plan
from mx_common.refit.table import Agent, ShardTable
from mx_common.transport import Progress, Reads, Transport, WireResult

if TYPE_CHECKING:
    import torch

__all__ = ["Reader", "Wire"]

_AGENTS_AT_ONCE = 8


class _Blocks(Protocol):
    """Rows of a plan that hold whole digest blocks of a shard."""

    @property
    def shard(self) -> npt.NDArray[np.int64]: ...
    @property
    def first_block(self) -> npt.NDArray[np.int64]: ...
    @property
    def blocks(self) -> npt.NDArray[np.int64]: ...


@dataclass
class Wire:
    """What the reads of one version added up to. `reading`: makes the progress hook of a read. `seconds`: with at least one going on."""

    reading: Callable[[], Progress]
    bytes: int = 0
    seconds: float = 0.0
    descriptors: int = 0
    by_agent: dict[str, list[float]] = field(default_factory=dict)
    _transports: list[str] = field(default_factory=list)

    @property
    def transport(self) -> str:
        """As really used: `ucx:tcp`, or several joined by `+`."""
        return "+".join(dict.fromkeys(self._transports))

    def spent(self, slot: str) -> float:
        """Seconds on the wire of what was added of this agent."""
        return self.by_agent[slot][1] if slot in self.by_agent else 0.0

    def add(self, slot: str, result: WireResult) -> None:
        """Count one agent's part."""
        self.bytes += result.wire_bytes
        self.descriptors += result.descriptors
        self._transports.append(result.transport)
        peer = self.by_agent.setdefault(slot, [0, 0.0])
        peer[0] += result.wire_bytes
        peer[1] += result.wire_seconds

    def peers(self) -> list[dict[str, object]]:
        """Bytes and seconds per source, for a record."""
        return [{"source": slot, "wire_bytes": int(n), "wire_s": round(s, 6)} for slot, (n, s) in self.by_agent.items()]


class Reader:
    """One receiver's transports, and its staging for pulls."""

    def __init__(self, name: str, opener: Callable[[str], Transport]) -> None:
        self._lanes = Lanes(name, opener)
        self._memory: Memory | None = None
        self._staging: torch.Tensor | None = None
        self._stuck = False

    def attach(self, memory: Memory, agents: Sequence[Agent], staging_bytes: int) -> None:
        """Be ready to read from `agents` into `memory`, and into `staging_bytes` of staging. Raises TransferError."""
        if memory is not self._memory:
            self._staging = None
        if staging_bytes and (self._staging is None or self._staging.numel() < staging_bytes):
            self._staging = memory.area(staging_bytes)
        if not self._lanes.suits(memory, agents):
            self._drop_transports()
        self._memory = memory
        self._lanes.attach(memory, agents)

    def run(self, plan: Plan, table: ShardTable, wire: Wire, seconds: Stages, *, verify: bool) -> None:
        """Raises TransferError, SourceLost, TransferTimeout, and DigestMismatch naming what differs."""
        assert self._memory is not None
        with timed(seconds, "wire"):
            self._read(
                table, wire, {agent: list(_exact(plan, table, agent, self._memory)) for agent in range(len(table.agents))}
            )
        if verify:
            with timed(seconds, "verify"):
                self._verify(table, plan.reads, self._memory, [int(addr) for addr in plan.reads.local_addr], plan.reads.length)
        if len(plan.pulls):
            assert self._staging is not None
            base = self._staging.data_ptr()
            for first, last in plan.batches(self._staging.numel()):
                ends = np.cumsum(plan.pulls.nbytes[first:last])
                offsets = ends - plan.pulls.nbytes[first:last]
                with timed(seconds, "wire"):
                    self._read(table, wire, _pulled(plan, table, first, last, base + offsets, self._memory))
                if verify:
                    with timed(seconds, "verify"):
                        rows = _Rows(
                            *(column[first:last] for column in (plan.pulls.shard, plan.pulls.first_block, plan.pulls.blocks))
                        )
                        self._verify(table, rows, self._memory, [base + int(o) for o in offsets], plan.pulls.nbytes[first:last])
                with timed(seconds, "copy"):
                    _copy(plan, first, last, base, offsets, self._memory)

    def reset(self) -> bool:
        """Give the transports up after an error. False when one could not be closed: then the memory it was reading into is kept for good,
        and must not be used again."""
        with contextlib.suppress(Exception):  # it is remembered
            self._drop_transports()
        stuck, self._stuck = self._stuck, False
        return not stuck

    def release(self) -> None:
        """Close the transports and forget the memory. Raises what a transport raises when it cannot be closed."""
        self._drop_transports()
        self._memory = self._staging = None

    def close(self) -> None:
        """The same, whatever the transports say."""
        self.reset()
        self._memory = self._staging = None

    def _drop_transports(self) -> None:
        try:
            self._lanes.close()
        except BaseException:
            self._memory = self._staging = None
            self._stuck = True
            raise

    def _read(self, table: ShardTable, wire: Wire, work: dict[int, list[Reads]]) -> None:
        """All reads of all agents, agents side by side; waits for all of them also when one fails."""
        todo = {agent: reads for agent, reads in work.items() if reads}
        if not todo:
            return
        start = time.perf_counter()
        if len(todo) == 1:
            results = [self._read_agent(table.agents[agent], reads, wire) for agent, reads in todo.items()]
        else:
            with ThreadPoolExecutor(min(_AGENTS_AT_ONCE, len(todo)), thread_name_prefix="mx-read") as pool:
                futures = [pool.submit(self._read_agent, table.agents[agent], reads, wire) for agent, reads in todo.items()]
            results = [future.result() for future in futures]
        wire.seconds += time.perf_counter() - start
        for agent, parts in zip(todo, results, strict=True):
            for part in parts:
                wire.add(table.agents[agent].slot, part)

    def _read_agent(self, agent: Agent, reads: Iterable[Reads], wire: Wire) -> list[WireResult]:
        """One agent's reads, one after the other: MX_TRANSFER_TIMEOUT at most, with what was read from it for this version before."""
        limit, stall = envs.TRANSFER_TIMEOUT.get(), envs.STALL_TIMEOUT.get()
        # on the wire: neither waiting for a transport that reads another source, nor whoever takes tensors between rounds
        spent = wire.spent(agent.slot)
        results = []
        for part in reads:
            if spent >= limit:
                raise TransferTimeout(
                    f"source {agent.slot} ({agent.name}) took {spent:.1f} s for a part of a version, and {limit:g} s is all it may take "
                    "for the whole; raise MX_TRANSFER_TIMEOUT if the link is that slow, or look for what slows it"
                )
            try:
                result = self._lanes.read(agent, part, timeout=limit - spent, stall_timeout=stall, progress=wire.reading())
            except TransferTimeout as error:
                if not spent:
                    raise
                raise TransferTimeout(
                    f"{error} (earlier reads from {agent.slot} took {spent:.1f} s of the {limit:g} s of MX_TRANSFER_TIMEOUT)"
                ) from error
            spent += result.wire_seconds
            results.append(result)
        return results

    def _verify(self, table: ShardTable, rows: _Blocks, memory: Memory, addr: list[int], nbytes: npt.NDArray[np.int64]) -> None:
        expected: list[npt.NDArray[np.uint64]] = []
        runs: list[torch.Tensor] = []
        owner: list[int] = []
        for row in range(len(addr)):
            count, shard = int(rows.blocks[row]), int(rows.shard[row])
            if not count:
                continue
            first = int(table.digest_offset[shard]) + int(rows.first_block[row])
            expected.append(table.digests[first : first + count])
            runs.append(memory.bytes_at(addr[row], int(nbytes[row])))
            owner.append(shard)
        wrong = differing(expected, runs)
        if wrong:
            shards = list(dict.fromkeys(owner[run] for run, _ in wrong))
            names = some_names([f"{table.names[table.tensor[s]]} of {table.agents[table.agent[s]].slot}" for s in shards])
            raise DigestMismatch(
                f"{len(wrong)} of {sum(map(len, expected))} row blocks differ from what was published ({names}); the "
                "trainer changed its weights while they were read (its MX_PUBLISH_WAIT_SECONDS ran out?), or the transport damaged them"
            )


@dataclass(frozen=True)
class _Rows:
    """Some rows of a plan's pulls."""

    shard: npt.NDArray[np.int64]
    first_block: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]


def _exact(plan: Plan, table: ShardTable, agent: int, memory: Memory) -> Iterable[Reads]:
    for part in plan.reads.expanded(agent):
        yield Reads(*part, table.agents[agent].mem, memory.mem)


def _pulled(
    plan: Plan, table: ShardTable, first: int, last: int, local: npt.NDArray[np.int64], memory: Memory
) -> dict[int, list[Reads]]:
    pulls = plan.pulls
    work = {}
    for agent in np.unique(pulls.agent[first:last]):
        mine = np.flatnonzero(pulls.agent[first:last] == agent)
        at = mine + first
        device = np.full(len(mine), memory.device.index or 0, dtype=np.uint64)
        work[int(agent)] = [
            Reads(
                pulls.remote_addr[at],
                local[mine].astype(np.uint64),
                pulls.nbytes[at].astype(np.uint64),
                pulls.remote_device[at],
                device,
                table.agents[int(agent)].mem,
                memory.mem,
            )
        ]
    return work


def _copy(plan: Plan, first: int, last: int, base: int, offsets: npt.NDArray[np.int64], memory: Memory) -> None:
    """Boxes out of the pulls [first, last), which lie at `base + offsets`."""
    copies, rows = plan.copies, plan.copies.rows_of(first, last)
    for row in range(rows.start, rows.stop):
        length, count = int(copies.length[row]), int(copies.count[row])
        far, near = int(copies.remote_stride[row]), int(copies.local_stride[row])
        source = base + int(offsets[int(copies.pull[row]) - first]) + int(copies.offset[row])
        into = int(copies.local_addr[row])
        _strided(memory, into, near, length, count).copy_(_strided(memory, source, far, length, count))


def _strided(memory: Memory, addr: int, stride: int, length: int, count: int) -> torch.Tensor:
    flat = memory.bytes_at(addr, stride * (count - 1) + length)
    return flat.as_strided((count, length), (stride, 1))
