"""Which writes of a recorded load remain, and which bytes none of them reaches.

    cover = Cover.of(home.layout.size, writes)
    cover.clashes, cover.hidden, cover.missing(start, size)

The parameter is cut along every edge of every box, and the cells are painted in the order of the writes. Invariant: exact, whatever the
boxes; the work grows with boxes and cells, not with bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Cover", "TooManyCells"]

_MAX_CELLS = 1 << 24

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""start, size"""


class TooManyCells(Exception):
    """The boxes cut a parameter into more cells than is sensible; raised inside the package only."""


@dataclass(frozen=True, eq=False)
class Cover:
    """`owner`: the last write of each cell, -1 where there is none. `clashes`: (earlier, later) writes that share a cell. `hidden`: writes
    of which no cell remains."""

    owner: npt.NDArray[np.int32]
    clashes: frozenset[tuple[int, int]]
    hidden: frozenset[int]
    cuts: tuple[dict[int, int], ...]
    sides: tuple[npt.NDArray[np.int64], ...]

    @classmethod
    def of(cls, size: tuple[int, ...], regions: Sequence[Region], also: Sequence[Region] = ()) -> Cover:
        """`regions`: a box of each write, in order. `also`: boxes that will be asked for. Raises TooManyCells."""
        edges = []
        for dim, side in enumerate(size):
            ends = {0, side}
            for start, extent in itertools.chain(regions, also):
                ends |= {start[dim], start[dim] + extent[dim]}
            edges.append(sorted(ends))
        cells = tuple(len(ends) - 1 for ends in edges)
        if np.prod(cells, dtype=np.float64) > _MAX_CELLS:
            raise TooManyCells
        cuts = tuple({end: at for at, end in enumerate(ends)} for ends in edges)
        owner: npt.NDArray[np.int32] = np.full(cells, -1, dtype=np.int32)
        clashes = set()
        for index, region in enumerate(regions):
            where = _slices(cuts, region)
            under = owner[where]
            if under.max(initial=-1) >= 0:
                clashes |= {(int(before), index) for before in np.unique(under) if before >= 0}
            owner[where] = index
        hidden = {before for before, _ in clashes}
        if hidden:
            hidden -= {int(index) for index in np.unique(owner)}
        sides: Any = tuple(np.diff(np.array(ends, dtype=np.int64)) for ends in edges)
        return cls(owner, frozenset(clashes), frozenset(hidden), cuts, sides)

    def elements(self, region: Region, chosen: npt.NDArray[np.bool_]) -> int:
        """How many elements of `region` lie in the chosen cells."""
        where = _slices(self.cuts, region)
        weights: Any = chosen[where].astype(np.int64)
        for dim in reversed(range(len(self.sides))):
            weights = weights @ self.sides[dim][where[dim]]
        return int(weights)


def _slices(cuts: tuple[dict[int, int], ...], region: Region) -> tuple[slice, ...]:
    start, size = region
    return tuple(slice(cut[at], cut[at + n]) for cut, at, n in zip(cuts, start, size, strict=True))
