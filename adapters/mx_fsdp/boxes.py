"""Which boxes of a global tensor one rank of a device mesh holds, from the facts alone: shape, mesh, coordinate, placements.

    local_layout((251, 64), (2,), (1,), [Shard(0)])
    # LocalLayout(replica=0, size=(125, 64), boxes=(LocalBox(start=(126, 0), size=(125, 64), offset=(0, 0)),))

torch says where a rank's part begins but not where it goes on when it has several ranges, which is what `_StridedShard` (FSDP applied on
top of tensor parallelism along the same dim) may give. Pure: needs neither torch nor a process group.

Invariant: over the coordinates with one replica index, the boxes cover every element of the tensor exactly once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mx_common.errors import ConfigError

__all__ = ["LocalBox", "LocalLayout", "local_layout"]

_Run = tuple[int, int]  # a half-open range of global indices


@dataclass(frozen=True)
class LocalBox:
    """`size` elements per dim: from `start` in the global tensor, from `offset` in the rank's local tensor."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True)
class LocalLayout:
    """What one rank holds. `replica`: 0 for the first group of ranks that together hold the tensor, 1 for the next. `size`: shape of the
    local tensor. `boxes`: none when the rank holds no element."""

    replica: int
    size: tuple[int, ...]
    boxes: tuple[LocalBox, ...]


def local_layout(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> LocalLayout:
    """The layout of the rank at `coordinate` of a mesh of `mesh_shape`, with one placement of torch per mesh dim, applied left to right as
    DTensor does. Raises ConfigError for placements that are neither replicated nor sharded."""
    runs: list[list[_Run]] = [[(0, n)] for n in shape]
    replica = 0
    for parts, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement.is_replicate():
            replica = replica * parts + index
        elif (factor := getattr(placement, "split_factor", None)) is not None:
            split = [_chunk(runs[placement.dim], factor, i) for i in range(factor)]
            runs[placement.dim] = [run for piece in split for run in _chunk(piece, parts, index)]
        elif placement.is_shard():
            runs[placement.dim] = _chunk(runs[placement.dim], parts, index)
        else:
            raise ConfigError(
                f"placement {placement} holds no part of the tensor itself; redistribute it to Shard or Replicate first"
            )
    size = tuple(sum(stop - start for start, stop in dim) for dim in runs)
    if 0 in size:
        return LocalLayout(replica, size, ())
    boxes = []
    for chosen in itertools.product(*(_placed(dim) for dim in runs)):
        boxes.append(
            LocalBox(
                start=tuple(start for start, _, _ in chosen),
                size=tuple(n for _, n, _ in chosen),
                offset=tuple(at for _, _, at in chosen),
            )
        )
    return LocalLayout(replica, size, tuple(boxes))


def _chunk(runs: Sequence[_Run], parts: int, index: int) -> list[_Run]:
    """Part `index` when the elements of `runs` are cut as torch.chunk cuts: parts of the rounded-up size, the last ones short or empty."""
    total = sum(stop - start for start, stop in runs)
    each = -(-total // parts)
    first, last = min(each * index, total), min(each * (index + 1), total)
    taken, at = [], 0
    for start, stop in runs:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            taken.append((start + low, start + high))
        at += stop - start
    return taken


def _placed(runs: Sequence[_Run]) -> list[tuple[int, int, int]]:
    """(start, size, offset in the local tensor) of each run, those that touch joined."""
    placed: list[tuple[int, int, int]] = []
    at = 0
    for start, stop in runs:
        if placed and placed[-1][0] + placed[-1][1] == start:
            begin, size, offset = placed[-1]
            placed[-1] = (begin, size + stop - start, offset)
        else:
            placed.append((start, stop - start, at))
        at += stop - start
    return placed
