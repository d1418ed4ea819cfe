"""The page: one HTML file with everything in it, which asks nothing of a network and runs no script but its own two.

    text = page_of(evidence, outcome)

Tables hold the figures of every plot, so that the page is whole without scripts. Invariant: a value out of a record is escaped, and the
page's content security policy names its scripts by their digests, so that nothing a record says can run or load anything.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from mx_common._printable import printable
from mx_common.gate import Evidence, Outcome
from mx_common.report.figures import figures_of, library, shortened
from mx_common.report.tables import RankRow, Report, Run, tabulate

__all__ = ["page_of", "render"]

_LAYOUT = {
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"color": "var(--ink)", "size": 12},
    "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--rule)", "font": {"color": "var(--ink)"}, "align": "left"},
    "margin": {"l": 8, "r": 8, "t": 24, "b": 8},
    # a finger that drags scrolls the page
    "dragmode": False,
}
_AXIS = {
    "automargin": True,
    "gridcolor": "var(--rule)",
    "linecolor": "var(--rule)",
    "zerolinecolor": "var(--rule)",
    "fixedrange": True,
}
_CLASSES = {"pass": "pass", "regression": "regression", "no evidence": "none"}
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_OPEN, _LONGEST = 12, 500
_TITLES = {
    "rates": "Rates",
    "stages": "Where the seconds went",
    "sources": "Bytes by source",
    "links": "Slowest links",
}


def page_of(evidence: Evidence, outcome: Outcome) -> str:
    """The page of a run. Raises ConfigError where plotly is not installed."""
    return render(tabulate(evidence, outcome))


def render(report: Report) -> str:
    """A report as HTML."""
    figures: dict[str, Any] = {}
    parts = []
    for number, run in enumerate(report.runs):
        drawn = {f"{name}-{number}": figure for name, figure in figures_of(run).items()}
        parts.append(_run(run, number, drawn))
        figures |= {name: _plain(figure) for name, figure in drawn.items()}
    if report.runs_in_all > len(report.runs):
        parts.append(
            _note(
                f"{report.runs_in_all - len(report.runs)} more paths and models are not shown; give fewer inputs to see them."
            )
        )
    drawing = _asset("page.js")
    scripts = [library(), drawing]
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            '<link rel="icon" href="data:,">',
            f"<title>{_escaped(report.verdict)}: weight transfers</title>",
            f"<style>{_asset('page.css')}</style>",
            "</head>",
            "<body>",
            _head(report),
            f"<noscript>{_note('Plots need scripts. The tables hold their figures.')}</noscript>",
            *parts,
            _note("Rates in Gbit/s, 1e9 bits a second, of one rank's transfer. Written by mx-adapters.", "footer"),
            f'<script type="application/json" id="figures">{_data(figures)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body>",
            "</html>",
            "",
        ]
    )


def _head(report: Report) -> str:
    said = "".join(f"<li>{_escaped(sentence)}</li>" for sentence in report.sentences)
    head = f"<h1>{_escaped(report.verdict)}</h1><p>{_escaped(report.headline)}</p><ul>{said}</ul>"
    return f'<header class="{_CLASSES[report.verdict]}">{head}</header>\n{_findings(report)}'


def _findings(report: Report) -> str:
    if not report.findings:
        return ""
    rows = [(one.rule, one.text, one.where) for one in report.findings]
    more = report.findings_in_all - len(report.findings)
    note = _note(f"{more:,} more findings: mx gate --json has all of them.") if more else ""
    return f"<h3>Findings</h3>{_table(('rule', 'finding', 'where'), rows, long=(1, 2))}{note}"


def _run(run: Run, number: int, drawn: Iterable[str]) -> str:
    model = f" of {_escaped(run.model)}" if run.model else ""
    facts = [
        ("transfers", f"{run.count:,}"),
        ("ranks", f"{run.ranks_in_all:,}"),
        ("steps", f"{run.steps:,}"),
        ("lowest", _rate(run.lowest)),
        ("median", _rate(run.median)),
        ("floor", run.floor if run.floor == "none" else f"{run.floor} Gbit/s"),
        *run.traits,
    ]
    cards = "".join(f"<div><dt>{_escaped(name)}</dt><dd>{_escaped(value)}</dd></div>" for name, value in facts)
    parts = [f"<section><h2>{_escaped(run.path)}{model}</h2><dl>{cards}</dl>"]
    if run.unmeasured:
        parts.append(_note("Unmeasured: " + ", ".join(f"{count:,} x {why}" for why, count in run.unmeasured) + "."))
    plots = {name.rsplit("-", 1)[0]: name for name in drawn}
    for name, title in _TITLES.items():
        table = _TABLES[name](run)
        if name in plots or table:
            plot = f'<div class="plot" id="{plots[name]}"></div>' if name in plots else ""
            notes = "".join(map(_note, _notes(run, name)))
            parts.append(f"<h3>{_heading(run, name, title)}</h3>{notes}{plot}{table}")
    return "\n".join([*parts, "</section>"])


def _heading(run: Run, name: str, title: str) -> str:
    if name == "rates":
        return "Rate of every rank over the steps" if run.rates else "Rate of every transfer, slowest first"
    return title


def _notes(run: Run, name: str) -> Sequence[str]:
    if name == "rates":
        return run.rates.notes if run.rates else ()
    if name == "stages":
        return run.stages.notes if run.stages else ()
    if name == "sources" and run.sources_in_all > len(run.sources):
        return (f"The {len(run.sources)} of {run.sources_in_all:,} sources that sent most.",)
    if name == "links" and run.links:
        of = (
            f"The slowest {len(run.links)} of {run.links_in_all:,} pairs of source and reader"
            if run.links_in_all > len(run.links)
            else "By pair of source and reader"
        )
        return (f"{of}; the rate is all bytes over all seconds of the pair, with warm-up.",)
    return ()


def _ranks(run: Run) -> str:
    headings = ("rank", "lowest", "median", "out of bounds", "host", "transfers", "lowest in step", "where")

    def row(one: RankRow) -> tuple[object, ...]:
        return (
            one.rank,
            _number(one.lowest),
            _number(one.median),
            one.out_of_bounds,
            one.host,
            one.transfers,
            one.lowest_step,
            one.where,
        )

    rows = [row(one) for one in run.ranks]
    numbers = (0, 1, 2, 3, 5, 6)
    whole = _table(headings, rows[:_OPEN], numbers)
    if len(rows) > _OPEN:
        left = run.ranks_in_all - len(rows)
        note = _note(f"{left:,} more ranks are not listed; none of them is worse.") if left else ""
        rest = _table(headings, rows[_OPEN:], numbers)
        whole += f"<details><summary>{len(rows) - _OPEN:,} more ranks, worst first</summary>{rest}{note}</details>"
    return whole


def _stages(run: Run) -> str:
    if run.stages is None:
        return ""
    first = "rank" if run.stages.bars == run.stages.ranks else "step"
    rows = [
        ((bar,) if first == "rank" else (bar, rank)) + tuple(f"{taken:.3f}" for taken in seconds) + (f"{sum(seconds):.3f}",)
        for bar, rank, seconds in zip(run.stages.bars, run.stages.ranks, run.stages.seconds, strict=True)
    ]
    names = (first,) if first == "rank" else (first, "rank")
    headings = (*names, *(f"{name} s" for name in run.stages.names), "total s")
    return _folded("The seconds as a table", _table(headings, rows, range(len(names), len(headings))))


def _sources(run: Run) -> str:
    rows = [(one.source, f"{one.wire_bytes / 1e9:.3f}", f"{one.share:.1%}", one.readers, one.transfers) for one in run.sources]
    return (
        _folded("The sources as a table", _table(("source", "GB", "share", "readers", "transfers"), rows, range(1, 5)))
        if rows
        else ""
    )


def _links(run: Run) -> str:
    headings = ("source", "reader", "rate", "lowest", "transport", "GB", "transfers", "lowest at")
    rows = [
        (
            one.source,
            one.reader,
            _number(one.gbps),
            _number(one.lowest),
            one.transport or None,
            f"{one.wire_bytes / 1e9:.3f}",
            one.transfers,
            one.where,
        )
        for one in run.links
    ]
    return _table(headings, rows, (2, 3, 5, 6)) if rows else ""


_TABLES = {"rates": _ranks, "stages": _stages, "sources": _sources, "links": _links}


def _table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], numbers: Iterable[int] = (), long: Iterable[int] = ()
) -> str:
    """Columns in `numbers` are set to the right, those in `long` hold sentences. None is shown as a dash."""
    classes = {**dict.fromkeys(numbers, ' class="number"'), **dict.fromkeys(long, ' class="long"')}
    head = "".join(f"<th{classes.get(n, '')}>{_escaped(name)}</th>" for n, name in enumerate(headings))
    body = "".join(f"<tr>{''.join(_cell(value, classes.get(n, '')) for n, value in enumerate(row))}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: object, attributes: str) -> str:
    return f"<td{attributes}>{_escaped('-' if value is None else value)}</td>"


def _folded(title: str, inner: str) -> str:
    return f"<details><summary>{_escaped(title)}</summary>{inner}</details>"


def _note(text: str, tag: str = "p") -> str:
    return f'<{tag} class="note">{_escaped(text)}</{tag}>'


def _rate(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1f} Gbit/s"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"


def _escaped(value: object) -> str:
    return html.escape(shortened(printable(str(value)), _LONGEST))


def _plain(figure: Any) -> dict[str, Any]:
    figure.update_layout(template="none", **_LAYOUT)
    figure.update_xaxes(**_AXIS)
    figure.update_yaxes(**_AXIS)
    whole: dict[str, Any] = figure.to_plotly_json()
    return whole


def _data(figures: dict[str, Any]) -> str:
    """JSON that can stand inside a script element."""
    text = json.dumps(figures, separators=(",", ":"), allow_nan=False)
    return "".join(_ESCAPES.get(character, character) for character in text)


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def _asset(name: str) -> str:
    return resources.files("mx_common.report").joinpath(name).read_text("utf-8")
