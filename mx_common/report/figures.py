"""Draws what `tables` has as plotly figures. Needs the extra `report`.

    figures = figures_of(report.runs[0])        # name -> plotly figure, in the order of the page

Colours that depend on light and dark are variables of the page's style sheet, which the page looks up when it draws. Invariant: text out
of a record reaches plotly escaped, as plotly reads some HTML in text.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from mx_common._plotly import need_plotly
from mx_common._printable import printable
from mx_common.report.rates import Rates
from mx_common.report.tables import LinkRow, Run, SourceRow, StageBars, TransferRow

__all__ = ["figures_of", "library", "shortened"]

# tells eight ranks and nine stages apart, for the colour-blind too, on white and on black
COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccaa22",
    "#66ccee",
    "#aa3377",
    "#ee7733",
    "#009988",
    "#999999",
    "#8866cc",
    "#aa7744",
    "#77aadd",
)
FLOOR, CEILING, INK, SLOW, IMPOSSIBLE = "var(--floor)", "var(--ceiling)", "var(--ink)", "var(--mark)", "var(--ceiling)"
OF_VERDICT = {"ok": COLOURS[0], "slow": SLOW, "impossible": IMPOSSIBLE}
_LABEL, _ROW_PIXELS, _NEAR = 26, 22, 2.5


def library() -> str:
    """The JavaScript that draws figures, to be put into a page. Raises ConfigError where plotly is not installed."""
    return str(need_plotly("a report").offline.get_plotlyjs())


def figures_of(run: Run) -> dict[str, Any]:
    """Figures of one run by name: rates, stages, sources, links; those that have something to show."""
    found = {
        "rates": _rates(run.rates) if run.rates else _transfers(run.transfers) if run.transfers else None,
        "stages": _stages(run.stages) if run.stages else None,
        "sources": _sources(run.sources) if run.sources else None,
        "links": _links(run.links) if run.links else None,
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _rates(rates: Rates) -> Any:
    graph = need_plotly("a report").graph_objects
    figure = graph.Figure()
    x = rates.steps
    if rates.band:
        edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "legendgroup": "band"}
        figure.add_scatter(x=x, y=rates.band.low, showlegend=False, **edge)
        figure.add_scatter(
            x=x, y=rates.band.high, fill="tonexty", fillcolor="rgba(128,128,128,0.25)", name="5 to 95 % of all ranks", **edge
        )
        middle = {"color": INK, "width": 1.5}
        figure.add_scatter(x=x, y=rates.band.middle, mode="lines", line=middle, name="median of all ranks")
        lowest = {"color": "#888888", "width": 1, "dash": "dot"}
        figure.add_scatter(x=x, y=rates.band.lowest, mode="lines", line=lowest, name="lowest of all ranks")
    for number, line in enumerate(rates.lines):
        figure.add_scatter(
            x=x,
            y=line.values,
            mode="lines+markers" if len(x) <= 40 else "lines",
            marker={"size": 4},
            line={"color": _colour(number), "width": 1.5},
            name=_text(line.name),
        )
    if rates.marks:
        figure.add_scatter(
            x=[mark.step for mark in rates.marks],
            y=[mark.gbps for mark in rates.marks],
            mode="markers",
            marker={
                "symbol": ["x" if mark.verdict == "slow" else "triangle-up" for mark in rates.marks],
                "size": 9,
                "color": [OF_VERDICT[mark.verdict] for mark in rates.marks],
            },
            text=[_text(f"{mark.verdict}: {mark.name}, {mark.where}", 120) for mark in rates.marks],
            hovertemplate="%{text}<br>step %{x}: %{y:.1f} Gbit/s<extra></extra>",
            name="out of bounds",
        )
    highest = max(
        [value for line in rates.lines for value in line.values if value is not None]
        + list(rates.band.high if rates.band else ())
    )
    highest = max([highest, *(mark.gbps for mark in rates.marks), *(value or 0.0 for value in rates.floor)])
    ceilings = [value for value in rates.ceiling if value is not None]
    far = bool(ceilings) and min(ceilings) > _NEAR * highest
    _bound(figure, x, rates.floor, "floor", FLOOR)
    if ceilings and not far:
        _bound(figure, x, rates.ceiling, "ceiling", CEILING)
        highest = max(highest, *ceilings)
    elif far:
        _note_above(figure, min(ceilings))
    figure.update_layout(height=380, hovermode="closest", legend=_above())
    figure.update_xaxes(title="step" if rates.together == 1 else f"step ({rates.together} a point)", tickformat="d")
    figure.update_yaxes(title="Gbit/s", range=[0, highest * 1.08 or 1.0])
    return figure


def _bound(figure: Any, x: Sequence[int], values: Sequence[float | None], name: str, colour: str) -> None:
    if any(value is not None for value in values):
        line = {"color": colour, "width": 2, "dash": "dash", "shape": "hv"}
        figure.add_scatter(x=x, y=values, mode="lines", line=line, name=name)


def _note_above(figure: Any, ceiling: float) -> None:
    at = {"xref": "paper", "yref": "paper", "x": 1, "y": 1, "xanchor": "right", "yanchor": "top"}
    figure.add_annotation(text=f"ceiling {ceiling:g} Gbit/s: above the plot", showarrow=False, **at)


def _transfers(rows: Sequence[TransferRow]) -> Any:
    hover = [_text(f"{row.name}: {row.verdict}, {row.where}", 120) for row in rows]
    figure = _bars(
        [row.name for row in rows], [row.gbps for row in rows], hover, [OF_VERDICT.get(row.verdict, COLOURS[8]) for row in rows]
    )
    highest = max(row.gbps for row in rows)
    floors, ceilings = [row.floor for row in rows if row.floor], [row.ceiling for row in rows if row.ceiling]
    if floors:
        highest = max(highest, *floors)
        _upright(figure, max(floors), "floor", FLOOR)
    if ceilings and min(ceilings) <= _NEAR * highest:
        highest = max(highest, min(ceilings))
        _upright(figure, min(ceilings), "ceiling", CEILING)
    elif ceilings:
        _note_above(figure, min(ceilings))
    figure.update_xaxes(title="Gbit/s", range=[0, highest * 1.08 or 1.0])
    return figure


def _upright(figure: Any, value: float, name: str, colour: str) -> None:
    figure.add_scatter(
        x=[value, value],
        y=[0, 1],
        yaxis="y2",
        mode="lines",
        line={"color": colour, "width": 2, "dash": "dash"},
        name=name,
        hovertemplate=f"{name} {value:g} Gbit/s<extra></extra>",
        showlegend=True,
    )
    figure.update_layout(
        legend=_above(), showlegend=True, yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    )


def _stages(stages: StageBars) -> Any:
    graph = need_plotly("a report").graph_objects
    figure = graph.Figure()
    places = list(range(len(stages.bars)))
    lying = stages.bars == stages.ranks  # loads are named by who read, which does not fit below a bar
    for number, name in enumerate(stages.names):
        taken = [row[number] for row in stages.seconds]
        across = {"x": taken, "y": places, "orientation": "h"} if lying else {"x": places, "y": taken}
        figure.add_bar(
            **across,
            name=_text(name),
            marker={"color": _colour(number)},
            text=[_text(f"{name}: {rank}") for rank in stages.ranks],
            textposition="none",
            hovertemplate=f"%{{text}}<br>%{{{'x' if lying else 'y'}:.3f}} s<extra></extra>",
        )
    every = 1 if lying else -(-len(places) // 12)
    ticks = {"tickvals": places[::every], "ticktext": [_text(bar) for bar in stages.bars[::every]]}
    if lying:
        figure.update_yaxes(autorange="reversed", **ticks)
        figure.update_xaxes(title="seconds", rangemode="tozero")
    else:
        figure.update_xaxes(title="step", **ticks)
        figure.update_yaxes(title="seconds", rangemode="tozero")
    height = max(320, 160 + _ROW_PIXELS * len(places)) if lying else 360
    figure.update_layout(barmode="stack", height=height, legend={**_above(), "traceorder": "normal"}, bargap=0.2)
    return figure


def _sources(rows: Sequence[SourceRow]) -> Any:
    hover = [_text(f"{row.source}: {row.share:.1%} of the bytes, to {row.readers} readers") for row in rows]
    figure = _bars([row.source for row in rows], [row.wire_bytes / 1e9 for row in rows], hover, [COLOURS[0]] * len(rows), "GB")
    figure.update_xaxes(title="GB sent", rangemode="tozero")
    return figure


def _links(rows: Sequence[LinkRow]) -> Any:
    names = [f"{shortened(row.source)} \N{RIGHTWARDS ARROW} {row.reader}" for row in rows]
    hover = [
        _text(f"{name} over {row.transport}; lowest {row.lowest:.1f}, {row.where}", 160)
        for name, row in zip(names, rows, strict=True)
    ]
    transports = list(dict.fromkeys(row.transport for row in rows))
    figure = _bars(names, [row.gbps for row in rows], hover, [_colour(transports.index(row.transport)) for row in rows])
    for number, transport in enumerate(transports):  # what a colour means
        figure.add_bar(
            x=[None], y=[None], name=_text(transport or "unknown"), marker={"color": _colour(number)}, showlegend=True
        )
    figure.update_layout(barmode="overlay", legend=_above(), showlegend=True)
    figure.update_xaxes(title="Gbit/s", rangemode="tozero")
    return figure


def _bars(
    names: Sequence[str], values: Sequence[float], hover: Sequence[str], colours: Sequence[str], unit: str = "Gbit/s"
) -> Any:
    """Lying bars, the first on top. Two of one name stay two."""
    graph = need_plotly("a report").graph_objects
    places = list(range(len(names)))
    figure = graph.Figure()
    figure.add_bar(
        x=values,
        y=places,
        orientation="h",
        marker={"color": colours},
        text=hover,
        textposition="none",
        hovertemplate=f"%{{text}}<br>%{{x:.4g}} {unit}<extra></extra>",
        showlegend=False,
    )
    figure.update_yaxes(autorange="reversed", tickvals=places, ticktext=[_text(name) for name in names])
    figure.update_layout(height=110 + _ROW_PIXELS * max(len(names), 3), bargap=0.25)
    return figure


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _above() -> dict[str, Any]:
    return {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "yref": "paper"}


def _text(text: str, most: int = _LABEL) -> str:
    return html.escape(shortened(printable(text), most), quote=False)


def shortened(text: str, most: int = _LABEL) -> str:
    """The two ends, by which a person knows a worker."""
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end - 1]}\N{HORIZONTAL ELLIPSIS}{text[-end:]}"
