"""How commands print: a table for people, plain columns in a pipe, JSON for programs.

    console = make_console()
    table = make_table(console, "model", "rank", "status")
    table.add_row(cell("org/model"), cell(0), cell("READY", "green"))
    show(console, table)

Invariant: what comes from the network or the environment is shown as it is: markup in it is not interpreted, and a control character
is shown as its escape. In a pipe there are no frames, no colours and no trailing blanks, and a line is at most COLUMNS (80) wide.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mx_common._printable import printable

__all__ = ["cell", "line", "make_console", "make_table", "print_json", "show", "span"]


UNFOLDED = 400


def make_console(*, stderr: bool = False, wide: bool = False) -> Console:
    """A console that draws on a terminal and writes plain text elsewhere. With `wide` and no terminal, lines are as long as they are."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if wide and not console.is_terminal:
        console.width = UNFOLDED
    return console


def make_table(console: Console, *headings: str, whole: Sequence[str] = ()) -> Table:
    """An empty table. Columns named in `whole` are never wrapped; the others share what is left of the width."""
    table = Table(
        box=box.SQUARE if console.is_terminal else None,
        padding=(0, 1) if console.is_terminal else (0, 2, 0, 0),
        pad_edge=console.is_terminal,
        header_style="bold",
    )
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading in whole)
    return table


def cell(value: object, style: str = "") -> Text:
    """A value as text that cannot break a table or a terminal; None is empty."""
    return Text(printable("" if value is None else str(value)), style=style)


def line(console: Console, text: str, style: str = "") -> None:
    """One line of text: wrapped on a terminal, never cut in a pipe."""
    console.print(cell(text, style), soft_wrap=not console.is_terminal)


def show(console: Console, what: RenderableType) -> None:
    """Print a table; without trailing blanks where it may be cut into columns by a program."""
    if console.is_terminal:
        console.print(what)
        return
    with console.capture() as captured:
        console.print(what)
    typer.echo("\n".join(row.rstrip() for row in captured.get().splitlines()))


def print_json(document: object, *, one_line: bool = False) -> None:
    """A document on stdout; ASCII, so that any reader of a pipe takes it."""
    typer.echo(json.dumps(document, indent=None if one_line else 2))


def span(seconds: float | None) -> str:
    """A duration in its largest unit: 59 s, 12 min, 3 h, 2 d; "unknown" for None."""
    if seconds is None:
        return "unknown"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
