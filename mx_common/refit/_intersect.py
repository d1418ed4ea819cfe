"""Which shard gives which part of which piece, as columns.

    overlaps = intersect(table, pieces, preference=None)
    overlaps.piece, overlaps.shard, overlaps.low, overlaps.size            # N boxes in global coordinates

Boxes of a tensor are sorted by their first row, so that a piece meets only the shards whose rows it can touch. Invariant: every element of
every piece is in exactly one overlap, given that the table's boxes are disjoint but for replicas (`ShardTable.check`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mx_common.errors import ConfigError, CoverageError, ManifestMismatch
from mx_common.refit.pieces import Int64, Pieces, Uint64
from mx_common.refit.table import ShardTable

__all__ = ["Levels", "Overlaps", "intersect", "levels", "split_rows"]

NAMED = 5  # how many offenders a message names


@dataclass(frozen=True, eq=False)
class Overlaps:
    """N boxes, each of one piece and one shard: `piece`, `shard` [N]; `low`, `size` [N, D] in global coordinates."""

    piece: Int64
    shard: Int64
    low: Int64
    size: Int64

    def __len__(self) -> int:
        return len(self.piece)


@dataclass(frozen=True, eq=False)
class Levels:
    """How a box lies in two memories: `length` [N] bytes that are dense in both; around them loops, innermost first, of `count` steps of
    `remote` and `local` bytes [N, D] (count 1: no loop); `depth` [N] loops."""

    length: Int64
    count: Int64
    remote: Int64
    local: Int64
    depth: Int64


def intersect(table: ShardTable, pieces: Pieces, preference: npt.ArrayLike | None = None) -> Overlaps:
    """The overlaps in order of pieces. `preference` [agents]: among equal shards the lowest is taken, a negative one never; those of equal
    preference share the bytes.

    Raises CoverageError for tensors the table lacks and for parts of pieces that no shard holds, ManifestMismatch for element sizes that
    differ and shards that overlap, ConfigError for a preference that does not fit the agents.
    """
    order = _preferences(table, preference)
    tensor = _tensors(table, pieces)
    ndim = max(table.size.shape[1], pieces.size.shape[1])
    start, size = widened(pieces.start, ndim, 0), widened(pieces.size, ndim, 1)
    boxes = _Boxes.of(table, tensor, order, ndim)
    wanted = np.flatnonzero((size > 0).all(axis=1))
    piece, box = boxes.met(tensor[wanted], start[wanted, 0], (start + size)[wanted, 0])
    piece = wanted[piece]
    low = np.maximum(start[piece], boxes.start[box])
    high = np.minimum((start + size)[piece], boxes.stop[box])
    kept = np.flatnonzero((high > low).all(axis=1))
    piece, box, low, extent = piece[kept], box[kept], low[kept], (high - low)[kept]
    _check_covered(table, pieces, piece, extent.prod(axis=1))
    needed = np.bincount(box, extent.prod(axis=1) * pieces.itemsize[piece], len(boxes.start)).astype(np.float64)
    shard = boxes.chosen(needed, table.agent, order)
    return Overlaps(piece, shard[box], low, extent)


def split_rows(overlaps: Overlaps, rows: Int64, cuts: Int64) -> Overlaps:
    """The same boxes with those at `rows` [M] cut along dim 0 at global rows `cuts` [M, C] (increasing; cuts outside a box do nothing)."""
    low, size = overlaps.low[rows, 0], overlaps.size[rows, 0]
    edges = np.clip(np.column_stack((low, cuts, low + size)), low[:, None], (low + size)[:, None])
    begin, extent = edges[:, :-1], np.diff(edges, axis=1)
    which, part = np.nonzero(extent)
    repeated = rows[which]
    lows, sizes = overlaps.low[repeated], overlaps.size[repeated]
    lows[:, 0], sizes[:, 0] = begin[which, part], extent[which, part]
    uncut = np.ones(len(overlaps), dtype=np.bool_)
    uncut[rows] = False
    joined = Overlaps(
        np.concatenate((overlaps.piece[uncut], overlaps.piece[repeated])),
        np.concatenate((overlaps.shard[uncut], overlaps.shard[repeated])),
        np.concatenate((overlaps.low[uncut], lows)),
        np.concatenate((overlaps.size[uncut], sizes)),
    )
    order = np.lexsort((joined.low[:, 0], joined.piece))
    return Overlaps(joined.piece[order], joined.shard[order], joined.low[order], joined.size[order])


def levels(size: Int64, itemsize: Int64, remote: Int64, local: Int64) -> Levels:
    """Runs of boxes of `size` [N, D] whose elements of `itemsize` [N] lie at strides `remote` and `local` [N, D] bytes.

    Trailing dims that are dense in both memories make the run; a dim that continues the loop below it is joined with it. The longest loop
    is put innermost, because the others are what a plan has to spell out.
    """
    rows, ndim = size.shape
    length = itemsize.astype(np.int64)
    count = np.ones((rows, ndim), dtype=np.int64)
    steps = np.zeros((2, rows, ndim), dtype=np.int64)
    depth = np.zeros(rows, dtype=np.int64)
    every = np.arange(rows)
    for dim in range(ndim - 1, -1, -1):
        n, far, near = size[:, dim], remote[:, dim], local[:, dim]
        moves = n > 1
        dense = moves & (depth == 0) & (far == length) & (near == length)
        top = np.maximum(depth - 1, 0)
        reach = count[every, top]
        on = moves & (depth > 0) & (far == steps[0, every, top] * reach) & (near == steps[1, every, top] * reach)
        length[dense] *= n[dense]
        count[every[on], top[on]] *= n[on]
        new = np.flatnonzero(moves & ~dense & ~on)
        at = depth[new]
        count[new, at], steps[0, new, at], steps[1, new, at] = n[new], far[new], near[new]
        depth[new] += 1
    deep = np.flatnonzero(depth > 1)
    longest = count[deep].argmax(axis=1)
    for column in (count, steps[0], steps[1]):
        column[deep, 0], column[deep, longest] = column[deep, longest], column[deep, 0]
    return Levels(length, count, steps[0], steps[1], depth)


def widened(columns: Int64, ndim: int, fill: int) -> Int64:
    """[N, D] with columns of `fill` added on the right up to `ndim`."""
    missing = ndim - columns.shape[1]
    return np.pad(columns, ((0, 0), (0, missing)), constant_values=fill) if missing else columns


@dataclass(frozen=True, eq=False)
class _Boxes:
    """B distinct boxes sorted by tensor and first row: `start`, `stop` [B, D]; the shards that hold box b are rows[first[b]:first[b + 1]].
    `begins`, `reaches` [B]: first row, and furthest row so far, as keys that grow with the tensor."""

    rows: Int64
    first: Int64
    start: Int64
    stop: Int64
    begins: Int64
    reaches: Int64
    span: int

    @classmethod
    def of(cls, table: ShardTable, tensor: Int64, preference: Int64, ndim: int) -> _Boxes:
        """Of the tensors `tensor` and the agents that may be used."""
        asked = np.zeros(len(table.names), dtype=np.bool_)
        asked[tensor] = True
        usable = (asked[table.tensor] & (preference[table.agent] >= 0)) if len(table) else np.zeros(0, dtype=np.bool_)
        rows = np.flatnonzero(usable & (table.size > 0).all(axis=1))
        start, size = table.start[rows], table.size[rows]
        varying: list[npt.NDArray[Any]] = [
            start[:, dim] for dim in range(start.shape[1] - 1, -1, -1) if len(rows) and start[:, dim].any()
        ]
        order = np.lexsort((table.agent[rows], *varying, table.tensor[rows]))
        rows, start, size = rows[order], start[order], size[order]
        owner = table.tensor[rows]
        same = (owner[1:] == owner[:-1]) & (start[1:] == start[:-1]).all(axis=1)
        clash = np.flatnonzero(same & (size[1:] != size[:-1]).any(axis=1))
        if len(clash):
            one, two = (_box(table, int(owner[i]), start[i], size[i]) for i in (clash[0], clash[0] + 1))
            raise ManifestMismatch(f"shards {one} and {two} overlap without being equal; ShardTable.check names all of them")
        first = np.flatnonzero(np.concatenate((np.ones(min(len(rows), 1), dtype=np.bool_), ~same)))
        start, stop = widened(start[first], ndim, 0), widened(start[first] + size[first], ndim, 1)
        span = int(table.shape[:, 0].max(initial=0)) + 1
        key = owner[first].astype(np.int64) * span
        return cls(
            rows, np.append(first, len(rows)), start, stop, key + start[:, 0], np.maximum.accumulate(key + stop[:, 0]), span
        )

    def met(self, tensor: Int64, low: Int64, high: Int64) -> tuple[Int64, Int64]:
        """(wanted, box): each wanted row range with the boxes of its tensor that may reach into it, a few too many."""
        key = tensor * self.span
        begin = np.searchsorted(self.reaches, key + np.minimum(low, self.span - 1), side="right")
        end = np.searchsorted(self.begins, key + np.minimum(high, self.span - 1), side="left")
        number = np.maximum(end - begin, 0)
        wanted = np.repeat(np.arange(len(tensor)), number)
        return wanted, np.arange(len(wanted)) + np.repeat(begin - np.cumsum(number) + number, number)

    def chosen(self, nbytes: npt.NDArray[np.float64], agent: npt.NDArray[np.int32], preference: Int64) -> Int64:
        """[B] the shard that each box is read from, so that equal holders share `nbytes` [B] evenly."""
        if len(self.rows) == len(self.start):
            return self.rows
        begin, holders = self.first[:-1], np.diff(self.first)
        rank = preference[agent[self.rows]]
        best = rank == np.repeat(np.minimum.reduceat(rank, begin), holders)
        able = np.add.reduceat(best.astype(np.int64), begin)
        # boxes with the same holders share one queue, of which each holder takes an equal part; a collision only makes parts less equal
        mixed = agent[self.rows].astype(np.uint64) + np.uint64(1)
        mixed = (mixed * np.uint64(0x9E3779B97F4A7C15)) ^ (mixed * np.uint64(0xC2B2AE3D27D4EB4F) >> np.uint64(29))
        queue = np.add.reduceat(np.where(best, mixed, np.uint64(0)), begin)
        order = np.argsort(queue, kind="stable")
        news = np.flatnonzero(np.concatenate(([True], np.diff(queue[order]) != 0)))
        lengths = np.diff(np.append(news, len(order)))
        upto = np.cumsum(nbytes[order])
        before = np.repeat(upto[news] - nbytes[order][news], lengths)
        total = np.repeat(np.add.reduceat(nbytes[order], news), lengths)
        middle = (upto - before - nbytes[order] / 2) / np.maximum(total, 1)
        pick = np.empty(len(order), dtype=np.int64)
        pick[order] = np.minimum((middle * able[order]).astype(np.int64), able[order] - 1)
        chosen: Int64 = self.rows[np.flatnonzero(best)[np.cumsum(able) - able + pick]]
        return chosen


def _preferences(table: ShardTable, preference: npt.ArrayLike | None) -> Int64:
    given: npt.NDArray[Any] = np.zeros(len(table.agents), dtype=np.int64) if preference is None else np.asarray(preference)
    if given.shape != (len(table.agents),) or (given.size and given.dtype.kind not in "iu"):
        raise ConfigError(
            f"preference is one whole number for each of the {len(table.agents)} agents; got {given.dtype} {given.shape}"
        )
    return given.astype(np.int64)


def _tensors(table: ShardTable, pieces: Pieces) -> Int64:
    """[P] row of each piece's tensor in the table."""
    known = {name: row for row, name in enumerate(table.names)}
    rows = np.array([known.get(name, -1) for name in pieces.names], dtype=np.int64)
    tensor: Int64 = rows[pieces.tensor] if len(rows) else np.zeros(len(pieces), dtype=np.int64)
    if (tensor < 0).any():
        lacking = [pieces.names[row] for row in np.unique(pieces.tensor[tensor < 0])]
        raise CoverageError(
            f"{len(lacking)} tensor(s) the receiver wants are published by no trainer rank: {', '.join(lacking[:NAMED])}"
            f"{', …' if len(lacking) > NAMED else ''}; map the names in the trainer's adapter, or restrict the refit to what is published"
        )
    unlike = np.flatnonzero(table.itemsize[tensor] != pieces.itemsize)
    if len(unlike):
        row = int(unlike[0])
        raise ManifestMismatch(
            f"{table.names[tensor[row]]} is published with {int(table.itemsize[tensor[row]])} bytes an element and wanted with "
            f"{int(pieces.itemsize[row])}; pieces take the source's dtype, conversion goes through staging"
        )
    return tensor


def _check_covered(table: ShardTable, pieces: Pieces, piece: Int64, volume: Int64) -> None:
    # float64 sums of whole numbers are exact up to 2**53 elements
    held = np.bincount(piece, volume, len(pieces)).astype(np.int64)
    wanted = pieces.size.prod(axis=1)
    over, under = np.flatnonzero(held > wanted), np.flatnonzero(held < wanted)
    for bad, error, what in (
        (over, ManifestMismatch, "held more than once"),
        (under, CoverageError, "held by no trainer rank"),
    ):
        if not len(bad):
            continue
        known = {name: row for row, name in enumerate(table.names)}
        texts = [
            f"{_box(table, known[pieces.names[pieces.tensor[row]]], pieces.start[row], pieces.size[row])} "
            f"({abs(int(wanted[row] - held[row]))} of {int(wanted[row])} elements)"
            for row in bad[:NAMED]
        ]
        raise error(
            f"{len(bad)} piece(s) with elements {what}: {'; '.join(texts)}{'; …' if len(bad) > NAMED else ''}; "
            "ShardTable.check names the shards, and every expected slot must have published"
        )


def _box(table: ShardTable, tensor: int, start: Int64, size: Int64) -> str:
    rank = int(table.ndim[tensor])
    sides = ", ".join(f"{int(at)}:{int(at + n)}" for at, n in zip(start[:rank], size[:rank], strict=True))
    return f"{table.names[tensor]}[{sides}]"


def dense_strides(size: Int64, itemsize: Int64) -> Int64:
    """[N, D] bytes from one element to the next along each dim of row-major boxes."""
    inner = np.cumprod(np.column_stack((itemsize, size[:, :0:-1])), axis=1)
    return np.ascontiguousarray(inner[:, ::-1])


def moved(addr: Uint64, steps: Int64, strides: Int64) -> Uint64:
    """`addr` [N] moved by `steps` [N, D] of `strides` [N, D] bytes."""
    at: Uint64 = addr + (steps * strides).sum(axis=1).astype(np.uint64)
    return at
