"""Where a strided view lies in the tensor it was cut from.

    boxes(whole, view, moves)                # -> the boxes of `whole` that `view` walks, and how far `moves` goes with each dim of them

narrow, chunk, split, select, transpose, permute, unflatten and every reshape that stays a view come down to an offset, sizes and strides;
reading those back needs no list of operations. Invariant: the boxes together hold exactly the view's elements, one to one, or the answer is
None.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["Box", "Layout", "boxes", "dense"]


@dataclass(frozen=True, slots=True)
class Layout:
    """A view of a storage, counted in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of the whole tensor. `moves`: how far the other side goes a step, per dim of the whole tensor (0 where the box has size 1);
    `moved`: where on the other side the box begins, from the view's first element."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    moves: tuple[int, ...]
    moved: int


def dense(size: tuple[int, ...]) -> Layout:
    """Row-major, from the storage's start."""
    stride = []
    step = 1
    for side in reversed(size):
        stride.append(step)
        step *= max(side, 1)
    return Layout(0, size, tuple(reversed(stride)))


@lru_cache(maxsize=1 << 16)  # layers are alike, and so are their experts
def boxes(whole: Layout, view: Layout, moves: tuple[int, ...], limit: int) -> tuple[Box, ...] | None:
    """The boxes of `whole` that `view` walks; `moves`: per dim of the view, how far the other side goes a step.

    One box where it can be; a view that steps over elements of a dim (one part of interleaved heads, every second row) gives a box a step,
    up to `limit`. None for what no such boxes make: elements repeated, diagonals, elements outside `whole`.
    """
    if 0 in view.size:
        return ()
    sides = sorted(
        ((step, move, n) for n, step, move in zip(view.size, view.stride, moves, strict=True) if n > 1), reverse=True
    )
    if any(step <= 0 for step, _, _ in sides):
        return None
    axes = sorted(
        ((step, n, dim) for dim, (n, step) in enumerate(zip(whole.size, whole.stride, strict=True)) if n > 1), reverse=True
    )
    if any(step < small * n for (step, _, _), (small, n, _) in itertools.pairwise([*axes, (1, 1, -1)])):
        return None  # the whole tensor's own elements share addresses
    start = _start(axes, len(whole.size), view.offset - whole.offset)
    return None if start is None else _walk(axes, start, _merged(sides), limit)


def _merged(sides: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbouring dims that are one run on both sides, as one dim; largest step first."""
    merged: list[tuple[int, int, int]] = []
    for step, move, n in sides:
        if merged and merged[-1][0] == step * n and merged[-1][1] == move * n:
            merged[-1] = (step, move, merged[-1][2] * n)
        else:
            merged.append((step, move, n))
    return merged


def _start(axes: list[tuple[int, int, int]], ndim: int, offset: int) -> list[int] | None:
    start = [0] * ndim
    for step, n, dim in axes:
        start[dim], offset = divmod(offset, step)
        if not 0 <= start[dim] < n:
            return None
    return None if offset else start


def _walk(
    axes: list[tuple[int, int, int]], start: list[int], sides: list[tuple[int, int, int]], limit: int
) -> tuple[Box, ...] | None:
    size, along, reach = [1] * len(start), [0] * len(start), [0] * len(start)
    loops: list[tuple[int, int, int, int]] = []  # dim, its step in the whole tensor, the other side's step, how often
    while sides:
        step, move, n = sides.pop()  # the smallest step that is left
        at = next((i for i, axis in enumerate(axes) if axis[0] <= step), None)
        if at is None or step % axes[at][0]:
            return None
        stride, room, dim = axes[at]
        every = step // stride
        if every == 1 and size[dim] == 1 and not reach[dim]:
            if start[dim] + n > room:  # runs over the end of this dim: whole rows of it, then on along the next larger one
                if start[dim] or n % room or not at or axes[at - 1][0] != stride * room:
                    return None
                sides.append((stride * room, move * room, n // room))
                n = room
            size[dim], along[dim], reach[dim] = n, move, n - 1
            continue
        reach[dim] += (n - 1) * every
        if start[dim] + reach[dim] >= room:
            return None
        if every == size[dim] and move == along[dim] * every and not any(loop[0] == dim for loop in loops):
            size[dim] *= n
        else:
            loops.append((dim, every, move, n))
    return _looped(start, size, along, loops, limit)


def _looped(
    start: list[int], size: list[int], along: list[int], loops: list[tuple[int, int, int, int]], limit: int
) -> tuple[Box, ...] | None:
    count = 1
    for loop in loops:
        count *= loop[3]
    if count > limit:
        return None
    found = []
    for turn in itertools.product(*(range(n) for _, _, _, n in loops)):
        at, moved = list(start), 0
        for (dim, every, move, _), i in zip(loops, turn, strict=True):
            at[dim] += every * i
            moved += move * i
        found.append(Box(tuple(at), tuple(size), tuple(along), moved))
    return tuple(found)
