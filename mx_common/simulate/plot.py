"""The picture of a simulation: one page without a network, for a browser.

    write_page(Path("simulate.html"), "32 sources, 128 targets", {"balanced": figures, "random": others})

Needs plotly (extra `report`). Invariant: the page holds the numbers of the figures, and computes none.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

from mx_common._plotly import need_plotly
from mx_common.simulate.figures import Figures

__all__ = ["draw", "write_page"]

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
_BAND = 0.15
# characters in a line of a label, so that a phone has room for the bars
_LABEL = 18
_LINE = "<br>"
_TITLES = ("Picks of each source, with 5 to 95 %", "Ratio to an even fleet", "Share of targets, %")
# pixels of a bar and the space around it, of the plot of picks, and of titles and margins
_BAR, _PICKS, _AROUND = 15, 260, 330


def write_page(file: Path, title: str, results: Mapping[str, Figures]) -> None:
    """Draw the figures of each policy into one HTML file that loads nothing. Raises ConfigError, OSError."""
    page = draw(results).to_html(include_plotlyjs=True, config={"displayModeBar": False, "responsive": True})
    # a phone would else show the page as wide as a desk
    head = f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    heading = f'<p style="font: 15px sans-serif; margin: 12px">{html.escape(title)}</p>'
    page = page.replace("<head>", f"<head>{head}", 1).replace("<body>", f"<body>{heading}", 1)
    file.write_text(page, encoding="utf-8")


def draw(results: Mapping[str, Figures]) -> Any:
    """A plotly figure, three plots under one another: picks of each source, ratios, shares. Raises ConfigError."""
    plotly = need_plotly("a plot")
    ratios, shares = (_bars(results, share) for share in (False, True))
    heights = [_PICKS, *(_BAR * (len(results) + 1) * len(names) for names in (ratios, shares))]
    height = sum(heights) + _AROUND
    page = plotly.subplots.make_subplots(
        rows=3,
        cols=1,
        subplot_titles=_TITLES,
        vertical_spacing=60 / height,
        row_heights=[part / sum(heights) for part in heights],
    )
    for index, (policy, figures) in enumerate(results.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        group = {"legendgroup": policy, "name": policy}
        for trace in _lines(plotly.graph_objects, figures, colour, group):
            page.add_trace(trace, row=1, col=1)
        for row, names in ((2, ratios), (3, shares)):
            page.add_trace(_bar(plotly.graph_objects, policy, names, colour, group), row=row, col=1)
    page.update_yaxes(rangemode="tozero", row=1, col=1)
    for row in (2, 3):
        page.update_yaxes(autorange="reversed", row=row, col=1)
    page.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 30, "r": 30, "t": 110, "b": 30},
        legend={"orientation": "h", "y": 1 + 40 / height, "yanchor": "bottom"},
    )
    return page


def _lines(go: Any, figures: Figures, colour: str, group: dict[str, str]) -> list[Any]:
    places = list(range(1, len(figures.picks_mean) + 1))
    band = go.Scatter(
        x=places + places[::-1],
        y=[*figures.picks_high, *figures.picks_low[::-1]],
        fill="toself",
        fillcolor=_faint(colour),
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
        **group,
    )
    return [band, go.Scatter(x=places, y=figures.picks_mean, mode="lines", line={"color": colour}, **group)]


def _bars(results: Mapping[str, Figures], share: bool) -> dict[str, dict[str, float]]:
    """Name of a figure -> policy -> value, for the figures that some policy has."""
    found: dict[str, dict[str, float]] = {}
    for policy, figures in results.items():
        for figure in figures.named():
            if figure.share is share and figure.value is not None:
                found.setdefault(figure.name, {})[policy] = figure.value * (100 if share else 1)
    return found


def _bar(go: Any, policy: str, names: dict[str, dict[str, float]], colour: str, group: dict[str, str]) -> Any:
    values = [of.get(policy) for of in names.values()]
    return go.Bar(
        x=values,
        y=[_LINE.join(wrap(name, _LABEL)) for name in names],
        orientation="h",
        marker={"color": colour},
        text=["" if value is None else f"{value:.3g}" for value in values],
        textposition="outside",
        textangle=0,
        cliponaxis=False,
        showlegend=False,
        **group,
    )


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{_BAND})"
