"""`mx gate`: fails a job when transfers were slow, impossible, or not measured.

Invariant: exit 0 only for evidence that is whole; 1 regression, 2 no evidence, 64 wrong usage.
"""

from __future__ import annotations

import os
import secrets
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from mx_common._plotly import need_plotly
from mx_common.cli import _judging
from mx_common.cli._judging import Rules, judged
from mx_common.cli._output import cell, line, make_console, make_table, print_json, show
from mx_common.errors import ConfigError
from mx_common.gate import Evidence, Outcome, Transfer
from mx_common.gate.outputs import WORDS, as_json, github, junit
from mx_common.gate.rules import NO_EVIDENCE
from mx_common.report import page_of

__all__ = ["command"]

_SHOWN = 30
_COLOURS = {0: "green", 1: "red", 2: "yellow"}
_JUNIT = typer.Option(None, "--junit", help="Write JUnit XML to this file as well.")
_HTML = typer.Option(None, "--html", help="Write the page of mx report to this file as well.")


def command(
    inputs: list[str] = _judging.INPUTS,
    expect_ranks: str = _judging.EXPECT_RANKS,
    expect_steps: str = _judging.EXPECT_STEPS,
    expect_paths: str = _judging.EXPECT_PATHS,
    max_slow_share: float = _judging.MAX_SLOW_SHARE,
    warmup: int = _judging.WARMUP,
    allow_unmeasured: bool = _judging.ALLOW_UNMEASURED,
    as_document: bool = typer.Option(False, "--json", help="One JSON document."),
    junit_file: Path = _JUNIT,
    html_file: Path = _HTML,
    annotate: bool = typer.Option(False, "--github", help="Print annotations for a GitHub job as well."),
) -> None:
    """Judge the records of a run. Green means: measured, against a floor, all that was expected, and no regression.

    \b
    Examples:
      mx gate run.log
      mx gate records/ --expect-ranks 8 --expect-steps 100 --expect-paths reshard
      kubectl logs -l app=rollout --prefix | mx gate - --junit gate.xml --html gate.html

    \b
    exit 1   a transfer above its ceiling or below its floor; a rank under half its cohort's median
             in half of its steps; the last third of the steps 1.2 x slower than the first
    exit 2   no record, an unknown or truncated one, a transfer without floor or unmeasured,
             a rank, step or path that is missing
    exit 64  wrong usage, an input that cannot be read, --html without plotly (pip install 'mx-adapters[report]')
    """
    try:
        if html_file is not None:
            need_plotly("a report")
        rules = Rules(expect_ranks, expect_steps, expect_paths, max_slow_share, warmup, allow_unmeasured)
        evidence, outcome = judged(inputs, rules)
        if junit_file is not None:
            junit_file.write_text(junit(outcome), encoding="utf-8")
        if html_file is not None:
            html_file.write_text(page_of(evidence, outcome), encoding="utf-8")
    except (ConfigError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    except Exception as error:  # 1 would say that the run was slow
        line(make_console(stderr=True), f"mx: the gate cannot judge this ({error!r}), which is a fault of mx: please report it")
        raise typer.Exit(NO_EVIDENCE) from error
    try:
        if as_document:
            print_json(as_json(outcome))
        else:
            _print(make_console(), evidence, outcome, quoted=annotate)
        for annotation in github(outcome) if annotate else ():
            typer.echo(annotation, err=as_document)  # a job reads both streams, and stdout holds one document
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough; the verdict is the same
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        line(make_console(stderr=True), f"mx: the verdict ({WORDS[outcome.code]}) cannot be printed: {error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(outcome.code)


def _print(console: Console, evidence: Evidence, outcome: Outcome, *, quoted: bool) -> None:
    """`quoted`: what records say is not taken for a command by a GitHub job."""
    token = secrets.token_hex(16)
    if quoted:
        typer.echo(f"::stop-commands::{token}")
    _print_verdict(console, evidence, outcome)
    if quoted:
        typer.echo(f"::{token}::")


def _print_verdict(console: Console, evidence: Evidence, outcome: Outcome) -> None:
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
