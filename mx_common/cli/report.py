"""`mx report`: a page that shows what the records of a run say.

Invariant: the page is the one that `mx gate --html` writes; the exit code says whether it was written, not what it says.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from mx_common._plotly import need_plotly
from mx_common.cli import _judging
from mx_common.cli._judging import Rules, judged
from mx_common.cli._output import line, make_console, print_json
from mx_common.errors import ConfigError
from mx_common.report import render, tabulate

__all__ = ["command"]

_OUTPUT = typer.Option(Path("report.html"), "--output", "-o", help="The page's file.")


def command(
    inputs: list[str] = _judging.INPUTS,
    output: Path = _OUTPUT,
    expect_ranks: str = _judging.EXPECT_RANKS,
    expect_steps: str = _judging.EXPECT_STEPS,
    expect_paths: str = _judging.EXPECT_PATHS,
    max_slow_share: float = _judging.MAX_SLOW_SHARE,
    warmup: int = _judging.WARMUP,
    allow_unmeasured: bool = _judging.ALLOW_UNMEASURED,
    as_document: bool = typer.Option(False, "--json", help="Print the figures of the page as one JSON document."),
) -> None:
    """Write a page that shows a run: verdict, rate of every rank, stages of each refit, bytes by source, slowest links.

    One file, about 5 MB, that needs no network and can be read on a phone. Its verdict is that of mx gate with the same options;
    the exit code is not: a job that has to fail calls mx gate, whose --html writes the same page.

    \b
    Examples:
      mx report run.log
      mx report records/ -o report.html --warmup 1
      kubectl logs -l app=rollout --prefix | mx report - -o rollout.html

    \b
    exit 0   the page was written, whatever it says
    exit 1   plotly is missing: pip install 'mx-adapters[report]'
    exit 64  wrong usage, an input that cannot be read, an output that cannot be written
    """
    need_plotly("a report")
    try:
        rules = Rules(expect_ranks, expect_steps, expect_paths, max_slow_share, warmup, allow_unmeasured)
        report = tabulate(*judged(inputs, rules))
        written = output.write_text(render(report), encoding="utf-8")
    except (ConfigError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if as_document:
        print_json({"file": str(output), **asdict(report)})
    else:
        line(make_console(), f"{output}: {report.verdict}; {report.headline} {written / 1e6:.1f} MB")
