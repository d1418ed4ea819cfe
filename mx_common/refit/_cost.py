"""What is read in place and what is pulled as whole rows of a shard, by modelled cost or because only that can be verified.

    arranged = arrange(table, overlaps, pieces, CostModel(), verify=True, pull_bytes=64 << 20)
    arranged.pull                                # [N] index of each overlap's pull, -1: exact reads in place

A digest covers a block of rows of a shard, so bytes can be verified where they land when they are whole blocks and dense there. Everything
else that must be verified is pulled in whole blocks. Without verification, rows are pulled when that is quicker than many short runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mx_common.errors import ConfigError
from mx_common.refit._intersect import Levels, Overlaps, dense_strides, levels, split_rows, widened
from mx_common.refit.pieces import Int64, Pieces
from mx_common.refit.table import ShardTable

__all__ = ["Arranged", "CostModel", "arrange"]

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class CostModel:
    """What a read costs: seconds for a byte on the wire, for each contiguous run besides, and for a byte of the copy out of staging.
    Only their ratios decide. Raises ConfigError for figures that are not positive."""

    seconds_per_byte: float = 1 / 3e9
    seconds_per_run: float = 0.5e-6
    copy_seconds_per_byte: float = 1 / 6e9

    def __post_init__(self) -> None:
        for name in ("seconds_per_byte", "seconds_per_run", "copy_seconds_per_byte"):
            value = getattr(self, name)
            if not (math.isfinite(value) and (value > 0 or (value == 0 and name == "seconds_per_run"))):
                raise ConfigError(f"CostModel.{name} is {value!r}; give a measured figure, finite and above 0")


@dataclass(frozen=True, eq=False)
class Arranged:
    """The N overlaps, some cut, and how each travels. `runs`: how it lies in both memories; `row` [N]: its first row in its shard;
    `pull` [N]: index of its pull, -1 for exact reads; `first_block`, `blocks` [N]: the whole digest blocks that exact reads fill, dense, in
    place (0 blocks: none). `pull_shard`, `pull_row`, `pull_rows` [Q]: what is pulled, in the order of the overlaps that need it.
    """

    overlaps: Overlaps
    runs: Levels
    pull: Int64
    first_block: Int64
    blocks: Int64
    pull_shard: Int64
    pull_row: Int64
    pull_rows: Int64


@dataclass(frozen=True, eq=False)
class _Rows:
    """Each overlap in rows of its shard: [low, high); `all_rows` of the shard; `unit`: rows of a digest block, 1 without digests; `wide`:
    it takes whole rows; bytes of a row, and of the overlap (`part_bytes`); `chunk`: most rows of a pull."""

    low: Int64
    high: Int64
    all_rows: Int64
    unit: Int64
    digested: Bools
    wide: Bools
    row_bytes: Int64
    part_bytes: Int64
    chunk: Int64

    @classmethod
    def of(cls, table: ShardTable, overlaps: Overlaps, pull_bytes: int, verify: bool) -> _Rows:
        shard = overlaps.shard
        size = widened(table.size[shard], overlaps.size.shape[1], 1)
        low = overlaps.low[:, 0] - table.start[shard, 0]
        blocks = np.diff(table.digest_offset)[shard]
        unit = np.where(blocks > 0, size[:, 0] // np.maximum(blocks, 1), 1)
        itemsize = table.itemsize[table.tensor[shard]]
        row_bytes = size[:, 1:].prod(axis=1) * itemsize
        wide = (overlaps.size[:, 1:] == size[:, 1:]).all(axis=1)
        least = unit if verify else np.ones_like(unit)
        chunk = least * np.maximum(pull_bytes // (least * row_bytes), 1)
        part_bytes = overlaps.size.prod(axis=1) * itemsize
        return cls(low, low + overlaps.size[:, 0], size[:, 0], unit, blocks > 0, wide, row_bytes, part_bytes, chunk)

    @property
    def whole_blocks(self) -> Bools:
        whole: Bools = self.wide & (self.low % self.unit == 0) & (self.high % self.unit == 0)
        return whole


def arrange(
    table: ShardTable, overlaps: Overlaps, pieces: Pieces, cost: CostModel, *, verify: bool, pull_bytes: int
) -> Arranged:
    """Decide for every overlap. `verify`: every byte is to be checked against a digest before it is used; `pull_bytes`: a pull is cut at
    row blocks when it would be larger. Raises ConfigError when bytes are to be verified that were published without digests."""
    rows = _Rows.of(table, overlaps, pull_bytes, verify)
    if verify and not rows.digested.all():
        bare = overlaps.shard[~rows.digested]
        agent = table.agents[table.agent[bare[0]]]
        raise ConfigError(
            f"{len(np.unique(bare))} shards (first: {table.names[table.tensor[bare[0]]]} of {agent.slot}) were published without "
            "digests and cannot be verified; publish with digests, or plan with verify=False"
        )
    if verify:
        # the whole blocks in the middle can land in place; only the ends have to be pulled
        ragged = np.flatnonzero(rows.wide & ~rows.whole_blocks)
        inner = np.column_stack((-(-rows.low // rows.unit), rows.high // rows.unit))[ragged]
        inner = np.where(inner[:, :1] < inner[:, 1:], inner, 0) * rows.unit[ragged, None]
        overlaps = split_rows(overlaps, ragged, inner + table.start[overlaps.shard[ragged], :1])
        rows = _Rows.of(table, overlaps, pull_bytes, verify)
    runs = _runs(table, overlaps, pieces)
    apart = ~(rows.whole_blocks & (runs.depth == 0)) if verify else runs.depth > 0
    long = np.flatnonzero(apart & (rows.low // rows.chunk != (rows.high - 1) // rows.chunk))
    if len(long):
        parts = int(((rows.high[long] - 1) // rows.chunk[long] - rows.low[long] // rows.chunk[long]).max())
        cuts = (rows.low[long] // rows.chunk[long])[:, None] + 1 + np.arange(parts)
        overlaps = split_rows(overlaps, long, cuts * rows.chunk[long, None] + table.start[overlaps.shard[long], :1])
        rows = _Rows.of(table, overlaps, pull_bytes, verify)
        runs = _runs(table, overlaps, pieces)
        apart = ~(rows.whole_blocks & (runs.depth == 0)) if verify else runs.depth > 0
    verifiable = rows.digested & rows.whole_blocks & (runs.depth == 0)
    pull, *ranges = _pulls(overlaps, rows, runs, np.flatnonzero(apart), cost, verify)
    exact = verifiable & (pull < 0)
    return Arranged(
        overlaps,
        runs,
        pull,
        np.where(exact, rows.low // rows.unit, 0),
        np.where(exact, (rows.high - rows.low) // rows.unit, 0),
        *ranges,
    )


def _runs(table: ShardTable, overlaps: Overlaps, pieces: Pieces) -> Levels:
    ndim = overlaps.size.shape[1]
    itemsize = pieces.itemsize[overlaps.piece]
    remote = dense_strides(widened(table.size[overlaps.shard], ndim, 1), itemsize)
    return levels(overlaps.size, itemsize, remote, widened(pieces.stride[overlaps.piece], ndim, 0))


def _pulls(
    overlaps: Overlaps, rows: _Rows, runs: Levels, apart: Int64, cost: CostModel, verify: bool
) -> tuple[Int64, Int64, Int64, Int64]:
    """(pull of each overlap, shard, first row, rows of each pull): the row ranges around the overlaps `apart`, joined where they touch
    within a chunk, and taken where verification or cost says so."""
    pull = np.full(len(overlaps), -1, dtype=np.int64)
    if not len(apart):
        none = np.zeros(0, dtype=np.int64)
        return pull, none, none, none
    unit, shard = rows.unit[apart] if verify else np.ones(len(apart), dtype=np.int64), overlaps.shard[apart]
    low, high = rows.low[apart] // unit * unit, -(-rows.high[apart] // unit) * unit
    # a chunk of a shard is where ranges may join; keys of row numbers grow with it
    order = np.lexsort((low, low // rows.chunk[apart], shard))
    shard, low, high, members, chunk = shard[order], low[order], high[order], apart[order], (low // rows.chunk[apart])[order]
    span = int(rows.all_rows.max()) + 1
    news = np.concatenate(([True], (shard[1:] != shard[:-1]) | (chunk[1:] != chunk[:-1])))
    lane = np.cumsum(news) * span
    reach = np.maximum.accumulate(lane + high)
    first = np.flatnonzero(news | np.concatenate(([False], (lane + low)[1:] > reach[:-1])))
    count = np.diff(np.append(first, len(order)))
    begin, end = low[first], np.maximum.reduceat(high, first)
    taken = np.ones(len(first), dtype=np.bool_)
    if not verify:
        nbytes = rows.part_bytes[members]
        exact = nbytes * cost.seconds_per_byte + runs.count[members].prod(axis=1) * cost.seconds_per_run
        whole = (end - begin) * rows.row_bytes[members][first] * cost.seconds_per_byte + cost.seconds_per_run
        taken = whole + np.add.reduceat(nbytes * cost.copy_seconds_per_byte, first) < np.add.reduceat(exact, first)
    # numbered in the order in which overlaps first need them, so that agents and tensors take turns as the pieces do
    earliest = np.where(taken, np.minimum.reduceat(members, first), len(overlaps))
    ranked = np.argsort(earliest, kind="stable")[: int(taken.sum())]
    number = np.full(len(first), -1, dtype=np.int64)
    number[ranked] = np.arange(len(ranked))
    pull[members] = np.repeat(number, count)
    return pull, shard[first][ranked], begin[ranked], (end - begin)[ranked]
