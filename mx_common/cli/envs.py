"""`mx envs`: every variable of the pack as this shell has it.

Invariant: never fails on a bad value; it is what shows them. Exit 1 when a value is not valid.
"""

from __future__ import annotations

import difflib
from typing import Any

import typer
from rich.console import Console

from mx_common import envs
from mx_common.cli._output import cell, line, make_console, make_table, print_json, show

__all__ = ["command", "meant", "problem_of"]


def command(
    meaning: bool = typer.Option(False, "--meaning", help="Also what each variable means, and its default."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show every variable of the pack: the value in force, where it comes from, whether it is valid.

    \b
    Examples:
      mx envs
      mx envs --meaning
      MX_TRANSFER_TIMEOUT=60 mx envs --json

    A bad value is never used: settings that decide what happens stop the command or the load that needs them, the others fall back to
    their default with a warning. Exit 1 when a value is not valid. Names that begin with MX_ and are not known are listed: most often
    they are typing errors.
    """
    variables = [_described(var) for var in envs.TABLE.values()]
    unknown = envs.unknown_names()
    if as_json:
        print_json({"variables": variables, "unknown": unknown})
    else:
        _print(make_console(), variables, unknown, meaning)
    if not all(row["valid"] for row in variables):
        raise typer.Exit(1)


def problem_of(var: envs.Var[Any]) -> str:
    """What is wrong with the variable's text and what follows, in one sentence; "" when nothing is."""
    setting = var.read()
    if not setting.problem:
        return ""
    follows = "what needs it stops" if var.strict else f"{var.shown_default} is used instead"
    return f"{var.name}={setting.raw!a} {setting.problem} (allowed: {var.allowed or var.kind}); {follows}"


def meant(name: str) -> str:
    """The variable a misspelt name is closest to, or ""."""
    return next(iter(difflib.get_close_matches(name, envs.TABLE, n=1, cutoff=0.75)), "")


def _described(var: envs.Var[Any]) -> dict[str, Any]:
    setting = var.read()
    given = bool(setting.raw and setting.raw.strip())
    value = setting.value
    shown = str(int(value) if isinstance(value, bool) else value)
    return {
        "group": var.group,
        "name": var.name,
        "kind": var.kind,
        "allowed": var.allowed,
        "default": var.shown_default,
        "value": shown if setting.origin == "environment" else var.shown_default,
        "origin": "environment" if given else "default",
        "valid": not setting.problem,
        "problem": problem_of(var),
        "meaning": var.meaning,
    }


def _print(console: Console, variables: list[dict[str, Any]], unknown: list[str], meaning: bool) -> None:
    headings = ("variable", "value", "origin", "valid", *(("meaning",) if meaning else ()))
    table = make_table(console, *headings, whole=("variable", "origin", "valid"))
    for row in variables:
        style = "" if row["valid"] else "red"
        cells = [row["name"], row["value"], row["origin"], "yes" if row["valid"] else "NO"]
        table.add_row(*(cell(text, style) for text in (*cells, *((_meaning(row),) if meaning else ()))))
    show(console, table)
    for row in variables:
        if row["problem"]:
            line(console, f"not valid: {row['problem']}", "red")
    for name in unknown:
        line(console, f"not a variable of this pack: {name}{_hint(name)}", "yellow")


def _meaning(row: dict[str, Any]) -> str:
    return f"{row['meaning']} (default {row['default']})"


def _hint(name: str) -> str:
    close = meant(name)
    return f"; did you mean {close}?" if close else ""
