"""The reads that fill a receiver's pieces from the shards of a version: exact, strided, in place, or whole rows and a local copy.

    plan = make_plan(table, pieces)                          # table.check() has passed
    for remote_addr, local_addr, length, _, _ in plan.reads.expanded(agent): ...
    plan.pulls, plan.copies                                  # pull rows into staging, then copy boxes out of them
    for first, last in plan.batches(staging_bytes): ...      # pulls that fit into staging together, and their copies

Planning is a function of its arguments and spells out no segment: a row is one strided read. Invariant: every byte of every piece is
written once, by a read or a copy, and nothing else is; with `verify` every byte comes out of whole digest blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mx_common.errors import ConfigError
from mx_common.refit._cost import CostModel, arrange
from mx_common.refit._intersect import dense_strides, intersect, moved, widened
from mx_common.refit.pieces import Int32, Int64, Pieces, Uint64
from mx_common.refit.table import ShardTable

__all__ = ["PULL_BYTES", "Copies", "CostModel", "Plan", "Pulls", "Segments", "StridedReads", "make_plan"]

PULL_BYTES = 64 << 20


class Segments(NamedTuple):
    """Contiguous reads, in the order of the columns of `transport.Reads`; all uint64 of one length."""

    remote_addr: Uint64
    local_addr: Uint64
    length: Uint64
    remote_device: Uint64
    local_device: Uint64


@dataclass(frozen=True, eq=False)
class _Columns:
    """Read-only columns of one length."""

    def __post_init__(self) -> None:
        for field in fields(self):
            column = getattr(self, field.name)
            column.setflags(write=False)

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))


@dataclass(frozen=True, eq=False)
class StridedReads(_Columns):
    """Reads that land in place, ordered by agent. Row r copies `count` runs of `length` bytes; run k is at `remote_addr + k *
    remote_stride` and goes to `local_addr + k * local_stride`. `agent`: row in the table's agents.

    `blocks` > 0: the row is one run (count 1) that holds exactly the digest blocks [first_block, first_block + blocks) of `shard`; 0 where
    no digest covers what is read, which a plan with `verify` has none of. `piece`: the piece it is of.
    """

    agent: Int32
    remote_addr: Uint64
    local_addr: Uint64
    length: Int64
    count: Int64
    remote_stride: Int64
    local_stride: Int64
    remote_device: Uint64
    local_device: Uint64
    shard: Int64
    first_block: Int64
    blocks: Int64
    piece: Int64

    def rows_of(self, agent: int) -> slice:
        """The rows of one agent."""
        low, high = np.searchsorted(self.agent, [agent, agent + 1])
        return slice(int(low), int(high))

    def expanded(self, agent: int, max_rows: int = 1 << 20) -> Iterator[Segments]:
        """Every run of an agent's reads as a row of its own, `max_rows` at a time: for transports that take flat lists."""
        rows = self.rows_of(agent)
        ends = np.cumsum(self.count[rows])
        total = int(ends[-1]) if len(ends) else 0
        for begin in range(0, total, max_rows):
            run = np.arange(begin, min(begin + max_rows, total))
            row = np.searchsorted(ends, run, side="right")
            step = run - (ends - self.count[rows])[row]
            row += rows.start
            yield Segments(
                self.remote_addr[row] + (step * self.remote_stride[row]).astype(np.uint64),
                self.local_addr[row] + (step * self.local_stride[row]).astype(np.uint64),
                self.length[row].astype(np.uint64),
                self.remote_device[row],
                self.local_device[row],
            )


@dataclass(frozen=True, eq=False)
class Pulls(_Columns):
    """Contiguous reads of whole rows [first_row, first_row + rows) of `shard` into staging, `nbytes` each, in the order in which pieces
    need them. `blocks` > 0: these are its digest blocks [first_block, first_block + blocks); 0 without verification."""

    agent: Int32
    remote_addr: Uint64
    nbytes: Int64
    remote_device: Uint64
    shard: Int64
    first_row: Int64
    rows: Int64
    first_block: Int64
    blocks: Int64


@dataclass(frozen=True, eq=False)
class Copies(_Columns):
    """Local copies out of pulls, ordered by `pull`: `count` runs of `length` bytes, run k from byte `offset + k * remote_stride` of the
    pull to `local_addr + k * local_stride`. `piece`: the piece it is of."""

    pull: Int64
    offset: Int64
    local_addr: Uint64
    length: Int64
    count: Int64
    remote_stride: Int64
    local_stride: Int64
    local_device: Uint64
    piece: Int64

    def rows_of(self, first: int, last: int) -> slice:
        """The rows of the pulls [first, last)."""
        low, high = np.searchsorted(self.pull, [first, last])
        return slice(int(low), int(high))


@dataclass(frozen=True, eq=False)
class Plan:
    """All reads of one receiver. `minimum_bytes`: of the boxes it wants, a box wanted twice counted once."""

    reads: StridedReads
    pulls: Pulls
    copies: Copies
    minimum_bytes: int

    @functools.cached_property
    def choice(self) -> dict[str, int]:
        """Wire bytes by way: {"exact": read in place, "whole": pulled as whole rows}."""
        return {"exact": int((self.reads.length * self.reads.count).sum()), "whole": self.staging_bytes}

    @functools.cached_property
    def agents(self) -> tuple[int, ...]:
        """Rows of the agents that it reads from."""
        found = np.flatnonzero(np.bincount(self.reads.agent)), np.flatnonzero(np.bincount(self.pulls.agent))
        return tuple(np.union1d(*found).tolist())

    @property
    def wire_bytes(self) -> int:
        """Bytes that cross the wire."""
        return sum(self.choice.values())

    @property
    def staging_bytes(self) -> int:
        """Bytes of all pulls together; `batches` needs less at a time."""
        return int(self.pulls.nbytes.sum())

    @property
    def descriptors(self) -> int:
        """Contiguous runs that are read, were every one spelled out."""
        return int(self.reads.count.sum()) + len(self.pulls)

    def batches(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """(first, last): consecutive pulls [first, last) of `nbytes` together at most. Raises ConfigError when one is larger: then plan
        with a smaller `pull_bytes`, or give more staging."""
        if len(self.pulls) and int(self.pulls.nbytes.max()) > nbytes:
            raise ConfigError(
                f"a pull of {int(self.pulls.nbytes.max())} bytes does not fit into {nbytes} bytes of staging; raise MX_STAGING_BYTES"
            )
        ends, first = np.cumsum(self.pulls.nbytes), 0
        while first < len(ends):
            before = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, before + nbytes, side="right"))
            yield first, last
            first = last


def make_plan(
    table: ShardTable,
    pieces: Pieces,
    *,
    cost: CostModel | None = None,
    verify: bool = True,
    preference: npt.ArrayLike | None = None,
    pull_bytes: int = PULL_BYTES,
) -> Plan:
    """The plan; a function of its arguments. `table`: its shards are disjoint but for replicas (`ShardTable.check`). `verify`: every byte
    must be checkable against a published digest. `preference` [agents] whole numbers: of equal holders the lowest are used and share the
    bytes evenly, a negative one never is. `pull_bytes`: most bytes of one pull, except where one row block is larger.

    Raises CoverageError, naming tensor and box, when a piece is not held in full; ManifestMismatch for element sizes that differ and
    shards that overlap; ConfigError when digests are wanted that were not published.
    """
    if pull_bytes < 1:
        raise ConfigError(f"pull_bytes is {pull_bytes}; give the most bytes that one pull may have, 1 or more")
    found = intersect(table, pieces, preference)
    arranged = arrange(table, found, pieces, cost or CostModel(), verify=verify, pull_bytes=pull_bytes)
    overlaps, runs = arranged.overlaps, arranged.runs
    piece, shard, ndim = overlaps.piece, overlaps.shard, overlaps.size.shape[1]
    far = dense_strides(widened(table.size[shard], ndim, 1), pieces.itemsize[piece])
    remote = moved(table.addr[shard], overlaps.low - widened(table.start[shard], ndim, 0), far)
    near = widened(pieces.stride[piece], ndim, 0)
    local = moved(pieces.addr[piece], overlaps.low - widened(pieces.start[piece], ndim, 0), near)
    # rows: the innermost loop stays one row, the loops around it are spelled out
    outer = runs.count[:, 1:].prod(axis=1)
    at = np.repeat(np.arange(len(overlaps)), outer)
    turn = np.arange(len(at)) - np.repeat(np.cumsum(outer) - outer, outer)
    remote, local = remote[at], local[at]
    for loop in range(1, ndim):
        step = turn % runs.count[at, loop]
        turn = turn // runs.count[at, loop]
        remote = remote + (step * runs.remote[at, loop]).astype(np.uint64)
        local = local + (step * runs.local[at, loop]).astype(np.uint64)
    shape = {
        "length": runs.length[at],
        "count": runs.count[at, 0],
        "remote_stride": runs.remote[at, 0],
        "local_stride": runs.local[at, 0],
        "local_addr": local,
        "local_device": pieces.device[piece[at]],
        "piece": piece[at],
    }
    pulls = _pulls(table, arranged.pull_shard, arranged.pull_row, arranged.pull_rows, verify)
    agent, pull = table.agent[shard[at]], arranged.pull[at]
    exact = np.flatnonzero(pull < 0)
    exact = exact[np.argsort(agent[exact], kind="stable")]
    reads = StridedReads(
        agent=agent[exact],
        remote_addr=remote[exact],
        remote_device=table.device[shard[at[exact]]],
        shard=shard[at[exact]],
        first_block=arranged.first_block[at[exact]],
        blocks=arranged.blocks[at[exact]],
        **_taken(shape, exact),
    )
    copied = np.flatnonzero(pull >= 0)
    copied = copied[np.argsort(pull[copied], kind="stable")]
    offset = (remote[copied] - pulls.remote_addr[pull[copied]]).astype(np.int64)
    copies = Copies(pull=pull[copied], offset=offset, **_taken(shape, copied))
    return Plan(reads, pulls, copies, _distinct_bytes(pieces))


def _taken(columns: dict[str, npt.NDArray[Any]], rows: Int64) -> dict[str, npt.NDArray[Any]]:
    return {name: column[rows] for name, column in columns.items()}


def _pulls(table: ShardTable, shard: Int64, first_row: Int64, rows: Int64, verify: bool) -> Pulls:
    row_bytes = table.size[shard, 1:].prod(axis=1) * table.itemsize[table.tensor[shard]]
    blocks = np.diff(table.digest_offset)[shard] if verify else np.zeros(len(shard), dtype=np.int64)
    unit = table.size[shard, 0] // np.maximum(blocks, 1)
    return Pulls(
        agent=table.agent[shard],
        remote_addr=table.addr[shard] + (first_row * row_bytes).astype(np.uint64),
        nbytes=rows * row_bytes,
        remote_device=table.device[shard],
        shard=shard,
        first_row=first_row,
        rows=rows,
        first_block=np.where(blocks > 0, first_row // unit, 0),
        blocks=np.where(blocks > 0, rows // unit, 0),
    )


def _distinct_bytes(pieces: Pieces) -> int:
    """Bytes of the pieces, equal boxes of a tensor counted once."""
    boxes = np.column_stack((pieces.tensor, pieces.start, pieces.size))
    order = np.lexsort(boxes.T)
    first = np.concatenate((np.ones(min(len(order), 1), dtype=np.bool_), (np.diff(boxes[order], axis=0) != 0).any(axis=1)))
    return int(pieces.nbytes[order][first].sum())
