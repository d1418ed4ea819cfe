"""Trainers and an engine as byte arrays, and a plan carried out between them, byte by byte."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mx_common.refit.pieces import Piece
from mx_common.refit.plan import CostModel, Plan
from mx_common.refit.table import Agent, ShardTable

Bytes = npt.NDArray[np.uint8]
Box = tuple[tuple[int, ...], tuple[int, ...]]  # start, size

AGENT_SPAN = 1 << 40  # addresses of agent n begin at (n + 1) * AGENT_SPAN
ENGINE = 1 << 50
UNTOUCHED = 0xEE
NEVER_PULL = CostModel(seconds_per_run=0.0, copy_seconds_per_byte=1.0)
ALWAYS_PULL = CostModel(seconds_per_run=1.0)


@dataclass
class Trainer:
    """Agents that hold shards of global tensors: [*shape, itemsize] bytes a tensor."""

    tensors: dict[str, Bytes]
    agents: int
    memory: dict[int, bytearray] = field(default_factory=dict)
    rows: list[tuple[str, Box, int, int, int]] = field(default_factory=list)  # name, box, agent, address, digest blocks

    def hold(self, name: str, start: Sequence[int], size: Sequence[int], *agents: int, blocks: int = 1) -> None:
        box = tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))
        for agent in agents:
            memory = self.memory.setdefault(agent, bytearray(b"\xaa" * 24))
            self.rows.append((name, (tuple(start), tuple(size)), agent, (agent + 1) * AGENT_SPAN + len(memory), blocks))
            memory += np.ascontiguousarray(self.tensors[name][box]).tobytes() + b"\xaa" * 8

    def table(self) -> ShardTable:
        names = list(self.tensors)
        ndim = max(1, *(tensor.ndim - 1 for tensor in self.tensors.values()))

        def padded(rows: Sequence[Sequence[int]], fill: int) -> npt.NDArray[np.int64]:
            return np.array([[*row, *[fill] * (ndim - len(row))] for row in rows], dtype=np.int64).reshape(-1, ndim)

        offset = np.concatenate(([0], np.cumsum([blocks for *_, blocks in self.rows]))).astype(np.int64)
        return ShardTable(
            names=tuple(names),
            dtype=tuple({1: "uint8", 2: "bfloat16", 4: "float32"}[tensor.shape[-1]] for tensor in self.tensors.values()),
            itemsize=np.array([tensor.shape[-1] for tensor in self.tensors.values()]),
            shape=padded([tensor.shape[:-1] for tensor in self.tensors.values()], 1),
            ndim=np.array([tensor.ndim - 1 for tensor in self.tensors.values()]),
            tensor=np.array([names.index(name) for name, *_ in self.rows], dtype=np.int32),
            start=padded([box[0] for _, box, *_ in self.rows], 0),
            size=padded([box[1] for _, box, *_ in self.rows], 1),
            addr=np.array([addr for _, _, _, addr, _ in self.rows], dtype=np.uint64),
            device=np.array([agent for _, _, agent, *_ in self.rows], dtype=np.uint64),
            agent=np.array([agent for _, _, agent, *_ in self.rows], dtype=np.int32),
            agents=tuple(Agent(f"slot{n}", f"agent{n}") for n in range(self.agents)),
            digests=np.zeros(offset[-1], dtype=np.uint64),
            digest_offset=offset,
        )


@dataclass
class Engine:
    """Destinations in one stretch of memory; knows by itself what every byte must be in the end."""

    tensors: dict[str, Bytes]
    expected: bytearray = field(default_factory=lambda: bytearray([UNTOUCHED] * 16))
    pieces: list[Piece] = field(default_factory=list)

    def room(self, nbytes: int) -> int:
        self.expected += bytes([UNTOUCHED] * (nbytes + 8))
        return len(self.expected) - nbytes - 8

    def want(self, name: str, start: Sequence[int], size: Sequence[int], at: int, stride: Sequence[int]) -> None:
        tensor = self.tensors[name]
        item = tensor.shape[-1]
        self.pieces.append(Piece(name, tuple(start), tuple(size), ENGINE + at, tuple(stride), item, device=3))
        for index in itertools.product(*map(range, size)):
            to = at + sum(i * step for i, step in zip(index, stride, strict=True))
            self.expected[to : to + item] = tensor[tuple(a + i for a, i in zip(start, index, strict=True))].tobytes()


def dense(size: Sequence[int], item: int) -> list[int]:
    return [item * int(np.prod(size[dim + 1 :], dtype=int)) for dim in range(len(size))]


def carried_out(plan: Plan, trainer: Trainer, engine: Engine) -> Bytes:
    """The engine's memory after the plan. Every address is looked up in the memory of its owner; one outside of it fails."""
    memory = np.full(len(engine.expected), UNTOUCHED, dtype=np.uint8)
    writes = np.zeros(len(memory), dtype=np.int64)

    def remote(agent: int, addr: int, nbytes: int) -> Bytes:
        at = addr - (agent + 1) * AGENT_SPAN
        assert 0 <= at <= at + nbytes <= len(trainer.memory[agent])
        return np.frombuffer(trainer.memory[agent], dtype=np.uint8)[at : at + nbytes]

    def write(addr: int, data: Bytes) -> None:
        at = addr - ENGINE
        assert 0 <= at <= at + len(data) <= len(memory)
        memory[at : at + len(data)] = data
        writes[at : at + len(data)] += 1

    for agent in range(trainer.agents):
        for segments in plan.reads.expanded(agent, max_rows=3):
            assert 1 <= len(segments.length) <= 3
            assert set(segments.remote_device.tolist()) == {agent}
            assert set(segments.local_device.tolist()) == {3}
            for far, near, length in zip(*(column.tolist() for column in segments[:3]), strict=True):
                write(near, remote(agent, far, length))
    pulls, copies = plan.pulls, plan.copies
    staged = [
        remote(int(agent), int(addr), int(n))
        for agent, addr, n in zip(pulls.agent, pulls.remote_addr, pulls.nbytes, strict=True)
    ]
    for row in range(len(copies)):
        source = staged[int(copies.pull[row])]
        for run in range(int(copies.count[row])):
            at = int(copies.offset[row] + run * copies.remote_stride[row])
            assert 0 <= at <= at + int(copies.length[row]) <= len(source)
            write(int(copies.local_addr[row]) + run * int(copies.local_stride[row]), source[at : at + int(copies.length[row])])
    assert writes.max(initial=0) <= 1
    return memory


def check(plan: Plan, trainer: Trainer, engine: Engine) -> None:
    memory = carried_out(plan, trainer, engine)
    assert memory.tobytes() == bytes(engine.expected)
    assert plan.wire_bytes == sum(plan.choice.values())
    assert plan.descriptors == int(plan.reads.count.sum()) + len(plan.pulls)


def check_whole_blocks(plan: Plan, table: ShardTable) -> None:
    """Every byte that is read belongs to a digest block that is read whole, to one dense place."""
    block_rows = table.size[:, 0] // np.maximum(np.diff(table.digest_offset), 1)
    block_bytes = (table.nbytes.astype(np.int64) // table.size[:, 0]) * block_rows
    reads, pulls = plan.reads, plan.pulls
    for part, nbytes in ((reads, reads.length), (pulls, pulls.nbytes)):
        assert (part.blocks > 0).all()
        assert (part.first_block + part.blocks <= np.diff(table.digest_offset)[part.shard]).all()
        assert (nbytes == part.blocks * block_bytes[part.shard]).all()
        assert (
            part.remote_addr == table.addr[part.shard] + (part.first_block * block_bytes[part.shard]).astype(np.uint64)
        ).all()
        assert (part.agent == table.agent[part.shard]).all()
    assert (reads.count == 1).all()


def tensor(shape: Sequence[int], item: int = 2, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (*shape, item), dtype=np.uint8)
