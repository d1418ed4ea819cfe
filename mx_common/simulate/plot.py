"""The picture of a simulation: one page without a network, for a browser.

    write_page(Path("simulate.html"), "32 sources, 128 targets", {"balanced": figures, "random": others})

Needs plotly (extra `report`). Invariant: the page holds the numbers of the figures, and computes none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

from mx_common.errors import ConfigError
from mx_common.simulate.figures import Figures

__all__ = ["draw", "need_plotly", "write_page"]

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
_BAND = 0.15
_LABEL, _LINE = 16, "<br>"


def need_plotly() -> Any:
    """The module that draws. Raises ConfigError when it is not installed."""
    try:
        import plotly.graph_objects
        import plotly.subplots
    except ImportError as error:
        raise ConfigError(f"a plot needs plotly ({error}); pip install 'mx-adapters[report]'") from error
    return plotly


def write_page(file: Path, title: str, results: Mapping[str, Figures]) -> None:
    """Draw the figures of each policy into one HTML file that loads nothing. Raises ConfigError, OSError."""
    page = draw(title, results).to_html(include_plotlyjs=True, config={"displaylogo": False, "responsive": True})
    # a phone would else show it as wide as a desk
    file.write_text(page.replace("<head>", '<head><meta name="viewport" content="width=device-width">', 1), encoding="utf-8")


def draw(title: str, results: Mapping[str, Figures]) -> Any:
    """Three plots under one another: picks of each source, ratios, shares. Raises ConfigError."""
    plotly = need_plotly()
    go = plotly.graph_objects
    names = (
        "Picks of a source, most picked first: mean, and 5th to 95th percentile",
        "Ratio to an even fleet",
        "Share of targets, %",
    )
    page = plotly.subplots.make_subplots(rows=3, cols=1, subplot_titles=names, vertical_spacing=0.09)
    for index, (policy, figures) in enumerate(results.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        group = {"legendgroup": policy, "name": policy}
        places = list(range(1, len(figures.picks_mean) + 1))
        page.add_trace(
            go.Scatter(
                x=places + places[::-1],
                y=[*figures.picks_high, *figures.picks_low[::-1]],
                fill="toself",
                fillcolor=_faint(colour),
                line={"width": 0},
                hoverinfo="skip",
                showlegend=False,
                **group,
            ),
            row=1,
            col=1,
        )
        page.add_trace(go.Scatter(x=places, y=figures.picks_mean, mode="lines", line={"color": colour}, **group), row=1, col=1)
        for row, share in ((2, False), (3, True)):
            known = [(f.name, f.value) for f in figures.named() if f.share is share and f.value is not None]
            values = [value * (100 if share else 1) for _, value in known]
            bars = go.Bar(
                x=[_LINE.join(wrap(name, _LABEL)) for name, _ in known],
                y=values,
                marker={"color": colour},
                text=[f"{value:.3g}" for value in values],
                textposition="outside",
                cliponaxis=False,
                showlegend=False,
                **group,
            )
            page.add_trace(bars, row=row, col=1)
    page.update_yaxes(rangemode="tozero")
    page.update_layout(
        title={"text": title, "font": {"size": 15}},
        template="plotly_white",
        height=1000,
        xaxis2={"tickangle": 0},
        xaxis3={"tickangle": 0},
        margin={"l": 40, "r": 20, "t": 110},
        legend={"orientation": "h", "y": 1.03, "yanchor": "bottom"},
    )
    return page


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{_BAND})"
