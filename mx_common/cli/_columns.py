"""Tables that fit any width: the columns that matter most stay, the others go one by one, and what is left is cut with an ellipsis.

    table = fitted([Column("model", cells, least=12), Column("host", hosts, spare=5)], width=80)

Invariant: a table is never wider than `width`, unless its indispensable columns at their least are; a row is one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["Column", "fitted", "widths"]

_GAP = 2


@dataclass(frozen=True)
class Column:
    """`least`: characters to which it may be cut; 0 = it is whole or not there. `spare`: 0 = always there; those with the highest number
    go first. `width`: of cells that are no text."""

    heading: str
    cells: Sequence[RenderableType]
    least: int = 0
    spare: int = 0
    right: bool = False
    width: int = 0

    @property
    def natural(self) -> int:
        """Characters that it takes when nothing is cut."""
        text = max((cell_len(cell.plain) for cell in self.cells if isinstance(cell, Text)), default=0)
        return max(cell_len(self.heading), text, self.width)

    @property
    def narrowest(self) -> int:
        """Characters that it takes at least."""
        return min(self.natural, self.least) if self.least else self.natural


def widths(columns: Sequence[Column], width: int) -> dict[int, int]:
    """Characters of each column that stays, by its place in `columns`."""
    kept = dict(enumerate(columns))

    def taken() -> int:
        return sum(column.narrowest + _GAP for column in kept.values()) - _GAP

    while taken() > width and any(column.spare for column in kept.values()):
        del kept[max(kept, key=lambda at: (kept[at].spare, at))]
    found = {at: column.narrowest for at, column in kept.items()}
    left = width - taken()
    for at in sorted(kept, key=lambda at: kept[at].spare):
        more = max(0, min(left, kept[at].natural - found[at]))
        found[at] += more
        left -= more
    return found


def fitted(columns: Sequence[Column], width: int) -> Table:
    """The columns that fit, side by side."""
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    chosen = widths(columns, width)
    for at, wide in chosen.items():
        column = columns[at]
        table.add_column(
            column.heading, width=wide, no_wrap=True, overflow="ellipsis", justify="right" if column.right else "left"
        )
    for row in zip(*(columns[at].cells for at in chosen), strict=True):
        table.add_row(*row)
    return table
