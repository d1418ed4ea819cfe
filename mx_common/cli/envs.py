"""`mx envs`: every variable of the pack as this shell has it.

Invariant: never fails on a bad value; it is what shows them. Exit 1 when a value is not valid.
"""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.table import Table

from mx_common import envs

__all__ = ["command"]


def command(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """Show every variable: value in force, origin, validity, meaning. Exit 1 when one is not valid."""
    rows = []
    for var in envs.TABLE.values():
        setting = var.read()
        given = setting.raw is not None and setting.raw.strip() != ""
        validity = "ok" if not setting.problem else f"{setting.raw!a} {setting.problem}; {var.allowed or var.kind}"
        shown = str(setting.value) if setting.origin == "environment" else var.shown_default
        rows.append((var.group, var.name, shown, "environment" if given else "default", validity, var.meaning))
    unknown = envs.unknown_names()
    if as_json:
        keys = ("group", "name", "value", "origin", "validity", "meaning")
        document = {"variables": [dict(zip(keys, row, strict=True)) for row in rows], "unknown": unknown}
        typer.echo(json.dumps(document, indent=2))
    else:
        table = Table("variable", "value", "origin", "valid", "meaning")
        for _, name, value, origin, validity, meaning in rows:
            table.add_row(name, value, origin, validity, meaning, style=None if validity == "ok" else "red")
        Console().print(table)
        if unknown:
            Console().print(f"set, but not variables of this pack: {', '.join(unknown)}", style="yellow", markup=False)
    if any(row[4] != "ok" for row in rows):
        raise typer.Exit(1)
