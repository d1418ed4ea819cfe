"""Boxes of many tensors at once: which are equal, which overlap, and what they leave uncovered.

    first = distinct(tensor, start, size)                    # one row of each set of replicas
    pair = overlapping(tensor[first], start[first], size[first])
    missing = uncovered(shape, starts, sizes)                # of one tensor

Invariant: boxes are non-empty and lie inside their tensors, so disjoint boxes cover a tensor exactly when their volumes add up to its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["distinct", "overlapping", "printed", "uncovered", "volumes"]

Ints = npt.NDArray[np.int64]
Box = tuple[tuple[int, int], ...]  # (from, to) per dim


def volumes(size: Ints) -> Ints:
    """[n] elements of boxes or tensors of sizes [n, D]."""
    # a column at a time: rows are a few elements long, where a reduction along them costs ten times as much
    return functools.reduce(np.multiply, size.T)


def distinct(tensor: npt.NDArray[np.int32], start: Ints, size: Ints) -> Ints:
    """Rows, by tensor and start: the first of each set of equal boxes."""
    order: Ints = np.lexsort((*size.T[::-1], *start.T[::-1], tensor))
    if not len(order):
        return order
    key = np.concatenate((tensor[order, None], start[order], size[order]), axis=1)
    changed = (key[1:] != key[:-1]).any(axis=1)
    # lexsort is stable, so the first of equals is the lowest row
    kept: Ints = order[np.concatenate(([True], changed))]
    return kept


def overlapping(tensor: npt.NDArray[np.int32], start: Ints, size: Ints) -> tuple[int, int] | None:
    """Two rows of one tensor with an element in common, or None.

    A sweep along the dim in which a tensor is cut finest: each row meets only the rows after it that begin before it ends, all tensors
    at once, so the work is that of the pairs which overlap in that dim.
    """
    if len(tensor) < 2:
        return None
    dim = _finest_dim(tensor, start)[tensor][:, None]
    low = np.take_along_axis(start, dim, axis=1)[:, 0]
    high = low + np.take_along_axis(size, dim, axis=1)[:, 0]
    order = np.lexsort((low, tensor))
    tensor, low, high, start, stop = tensor[order], low[order], high[order], start[order], (start + size)[order]
    left = np.arange(len(order))
    for step in range(1, len(order)):
        left = left[left + step < len(order)]
        right = left + step
        met = (tensor[left] == tensor[right]) & (low[right] < high[left])
        left, right = left[met], right[met]
        if not len(left):
            return None
        hit = ((start[left] < stop[right]) & (start[right] < stop[left])).all(axis=1)
        if hit.any():
            at = int(np.argmax(hit))
            return int(order[left[at]]), int(order[right[at]])
    return None


def _finest_dim(tensor: npt.NDArray[np.int32], start: Ints) -> Ints:
    """[T] the dim with the most different starts."""
    counts = []
    for column in start.T:
        order = np.lexsort((column, tensor))
        owner, value = tensor[order], column[order]
        fresh = np.concatenate(([True], (owner[1:] != owner[:-1]) | (value[1:] != value[:-1])))
        counts.append(np.bincount(owner[fresh], minlength=int(tensor.max()) + 1))
    finest: Ints = np.argmax(np.stack(counts), axis=0)
    return finest


def uncovered(shape: Sequence[int], starts: Iterable[Sequence[int]], sizes: Iterable[Sequence[int]]) -> Box | None:
    """A box of a tensor of `shape` that none of the given boxes touches, or None when they cover it."""
    free: list[Box] = [tuple((0, n) for n in shape)]
    for start, size in zip(starts, sizes, strict=True):
        taken = tuple((at, at + n) for at, n in zip(start, size, strict=True))
        free = [part for box in free for part in _without(box, taken)]
    return free[0] if free else None


def _without(box: Box, taken: Box) -> list[Box]:
    """What is left of `box`, as disjoint boxes."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, taken, strict=True))
    if any(low >= high for low, high in common):
        return [box]
    left = []
    for dim, ((low, high), (first, last)) in enumerate(zip(box, common, strict=True)):
        left += [(*common[:dim], edge, *box[dim + 1 :]) for edge in ((low, first), (last, high)) if edge[0] < edge[1]]
    return left


def printed(box: Iterable[Sequence[int]]) -> str:
    """`[0:4, 8:16]`; `[]` for the one element of a scalar."""
    return f"[{', '.join(f'{low}:{high}' for low, high in box)}]"
