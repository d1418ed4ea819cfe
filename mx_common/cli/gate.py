"""`mx gate`: fails a job when transfers were slow, impossible, or not measured.

Invariant: exit 0 only for evidence that is whole; 1 regression, 2 no evidence, 64 wrong usage.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from mx_common.cli._output import cell, line, make_console, make_table, print_json, show
from mx_common.errors import ConfigError
from mx_common.gate import Evidence, Limits, Outcome, Transfer, Wanted, judge, read
from mx_common.gate.outputs import WORDS, as_json, github, junit

__all__ = ["command"]

_SHOWN = 30
_COLOURS = {0: "green", 1: "red", 2: "yellow"}
_MOST = 1 << 20
_INPUTS = typer.Argument(..., metavar="INPUT...", help="Log files, folders of them, gzip, files of records, - for a pipe.")
_JUNIT = typer.Option(None, "--junit", help="Write JUnit XML to this file as well.")


def command(
    inputs: list[str] = _INPUTS,
    expect_ranks: str = typer.Option(None, help="Ranks that each step of each path must have: 8 (0 to 7), or 0,2,4-7."),
    expect_steps: str = typer.Option(None, help="Steps that each path must have: 100 (so many), or 1-100."),
    expect_paths: str = typer.Option(None, help="Paths that must be there: load,reshard,staged."),
    max_slow_share: float = typer.Option(0.0, help="Share of measured transfers that may be slow."),
    warmup: int = typer.Option(0, help="First steps of each path that are not judged by speed."),
    allow_unmeasured: bool = typer.Option(False, help="Transfers below MX_FLOOR_MIN_BYTES are no missing evidence."),
    as_document: bool = typer.Option(False, "--json", help="One JSON document."),
    junit_file: Path = _JUNIT,
    annotate: bool = typer.Option(False, "--github", help="Print annotations for a GitHub job as well."),
) -> None:
    """Judge the records of a run. Green means: measured, against a floor, all that was expected, and no regression.

    \b
    Examples:
      mx gate run.log
      mx gate records/ --expect-ranks 8 --expect-steps 100 --expect-paths reshard
      kubectl logs -l app=rollout --prefix | mx gate - --junit gate.xml

    \b
    exit 1   a transfer above its ceiling or below its floor; a rank under half its cohort's median
             in half of its steps; the last third of the steps 1.2 x slower than the first
    exit 2   no record, an unknown or truncated one, a transfer without floor or unmeasured,
             a rank, step or path that is missing
    exit 64  wrong usage
    """
    try:
        steps = _numbers(expect_steps, "--expect-steps")
        counted = steps is not None and expect_steps.strip().isdigit()
        wanted = Wanted(
            ranks=_ranks(expect_ranks),
            steps=None if counted else steps,
            step_count=int(expect_steps) if counted else None,
            paths=None if expect_paths is None else frozenset(name.strip() for name in expect_paths.split(",") if name.strip()),
        )
        limits = Limits(max_slow_share, warmup, allow_unmeasured)
        evidence = read(inputs)
        outcome = judge(evidence, wanted, limits)
        if junit_file is not None:
            junit_file.write_text(junit(outcome), encoding="utf-8")
    except (ConfigError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if as_document:
        print_json(as_json(outcome))
    else:
        _print(make_console(), evidence, outcome)
    for annotation in github(outcome) if annotate else ():
        typer.echo(annotation)
    raise typer.Exit(outcome.code)


def _print(console: Console, evidence: Evidence, outcome: Outcome) -> None:
    if outcome.findings:
        table = make_table(console, "rule", "finding", "where", whole=("rule",))
        for finding in outcome.findings[:_SHOWN]:
            colour = "red" if finding.kind == "regression" else "yellow"
            table.add_row(cell(finding.rule, colour), cell(finding.text), cell(finding.where))
        show(console, table)
        if len(outcome.findings) > _SHOWN:
            line(console, f"and {len(outcome.findings) - _SHOWN} more: --json has all of them")
    if evidence.transfers:
        show(console, _summary(console, evidence.transfers))
    counted = ", ".join(f"{count} {verdict}" for verdict, count in sorted(outcome.counts.items())) or "none"
    dropped = f", {outcome.dropped} of them in warm-up steps" if outcome.dropped else ""
    line(console, f"{WORDS[outcome.code]}: {len(evidence.transfers)} transfers ({counted}){dropped}", _COLOURS[outcome.code])


def _summary(console: Console, transfers: list[Transfer]) -> Table:
    runs: dict[tuple[str, str], list[Transfer]] = defaultdict(list)
    for row in transfers:
        runs[row.path, row.model].append(row)
    table = make_table(console, "path", "model", "transfers", "ranks", "steps", "lowest", "median", "floor", whole=("path",))
    for (path, model), rows in sorted(runs.items()):
        rates = [row.gbps for row in rows if row.gbps is not None]
        floors = {f"{row.floor:g}" for row in rows if row.floor}
        table.add_row(
            cell(path),
            cell(model),
            cell(len(rows)),
            cell(len({row.rank for row in rows})),
            cell(len({row.step for row in rows})),
            cell(f"{min(rates):.1f}" if rates else "-"),
            cell(f"{statistics.median(rates):.1f}" if rates else "-"),
            cell(" to ".join(sorted(floors, key=float)[:: max(len(floors) - 1, 1)]) or "none"),
        )
    return table


def _ranks(text: str | None) -> frozenset[int] | None:
    if text is not None and text.strip().isdigit():
        return frozenset(range(min(int(text), _MOST)))
    return _numbers(text, "--expect-ranks")


def _numbers(text: str | None, option: str) -> frozenset[int] | None:
    """`0,2,4-7` as numbers. Raises ConfigError."""
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None or not (first := int(match[1])) <= (last := int(match[2] or match[1])) <= _MOST:
            raise ConfigError(f"{option} {text!r}: write a number, or numbers and ranges such as 0,2,4-7")
        found.update(range(first, last + 1))
    return frozenset(found)
