"""Makes the picture of docs/metrics.md: every panel of the dashboard, its expressions answered by a real Prometheus, drawn with plotly.

    .venv/bin/python -m scripts.metrics_picture         # two minutes and a half

It starts the made-up fleet of tests/support/metrics_fleet.py, has Prometheus scrape its pages each second, asks it what Grafana would ask,
and photographs the answers in the dashboard's grid. It is no part of `make docs`: it needs Prometheus (Debian's package `prometheus`)
and Chromium (`make chromium`). Raises SystemExit, with its title, for a panel that should have data and has none.
"""

from __future__ import annotations

import html
import io
import json
import math
import re
import shutil
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import plotly.graph_objects as graph
from PIL import Image

from mx_common.report.figures import COLOURS, library
from tests.support.browser import Browser
from tests.support.metrics_fleet import SECONDS, Fleet, free_ports
from tests.support.process import Process

ROOT = Path(__file__).parents[1]
IMAGE, DASHBOARD = ROOT / "docs" / "images" / "metrics.png", ROOT / "examples" / "grafana" / "mx-dashboard.json"
# All times are a fifteenth of those of examples/prometheus/prometheus.yml; step and window are as Grafana takes them for such a scrape.
SCRAPE, STEP, WINDOW = 1, 3, 4
# nothing of this kind happens to the fleet
QUIET = {"Impossible rates", "Ranks with mixed weights"}
# what Grafana's units are to plotly: a format and what comes after it
SI = ".3~s"
UNITS = {"bps": (SI, "b/s"), "Bps": (SI, "B/s"), "s": (SI, "s"), "percentunit": (".0%", ""), "ops": ("~g", " ops/s")}
INKS = {"green": "#2e8b57", "orange": "#e07b00", "red": "#d6304a"}
COLUMNS, WIDTH, CELL, GAP = 24, 1080, 21, 7
STYLE = f"""
body {{ margin: 0; padding: {GAP}px; background: #f1f3f5; font: 12px sans-serif; color: #24292f; width: {WIDTH}px;
  display: grid; grid: auto-flow {CELL}px / repeat({COLUMNS}, 1fr); gap: {GAP}px; }}
section {{ background: white; border: 1px solid #d8dde2; border-radius: 3px; min-width: 0; min-height: 0; }}
section {{ display: flex; flex-direction: column; }}
h2 {{ font-size: 14px; margin: 0; align-self: end; }} h3 {{ font-size: 12.5px; margin: 5px 8px 0; }}
.plot {{ flex: 1; position: relative; }} .plot > div {{ position: absolute; inset: 0; }}
p {{ order: 1; margin: 2px 8px 5px; font-size: 11px; line-height: 14px; }}
span {{ display: inline-block; margin-right: 10px; }} i {{ display: inline-block; width: 10px; height: 4px; margin: 0 4px 3px 0; }}"""


class Asked:
    """Prometheus at `port`, asked as Grafana asks for the seconds from `start` to `end`."""

    def __init__(self, port: int, start: float, end: float) -> None:
        self._base, self.start, self.end = f"http://127.0.0.1:{port}/api/v1", start, end
        self.times = [start + STEP * number for number in range(int((end - start) / STEP) + 1)]

    def series(self, target: dict[str, Any]) -> Iterator[tuple[str, list[float | None]]]:
        """Legend and values of each series: at every step, or the last one for an instant query."""
        expression = target["expr"].replace("$__rate_interval", f"{WINDOW}s").replace("$instance", ".*")
        when = {"time": self.end} if target.get("instant") else {"start": self.start, "end": self.end, "step": STEP}
        for found in self.get("query" if target.get("instant") else "query_range", query=expression, **when)["result"]:
            known = {round(at - self.start): float(value) for at, value in found.get("values") or [found["value"]]}
            values = list(known.values()) if target.get("instant") else [known.get(round(at - self.start)) for at in self.times]
            name = re.sub(r"{{\s*(\w+)\s*}}", lambda label, of=found["metric"]: of.get(label[1], ""), target["legendFormat"])
            yield name, [value if value is not None and math.isfinite(value) else None for value in values]

    def get(self, method: str, **given: Any) -> Any:
        with urllib.request.urlopen(f"{self._base}/{method}?{urllib.parse.urlencode(given)}", timeout=30) as answer:
            return json.load(answer)["data"]


def main() -> None:
    if (prometheus := shutil.which("prometheus")) is None:
        sys.exit("no prometheus: apt-get install --no-install-recommends prometheus")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, ExitStack() as ended:
        folder = Path(scratch)
        fleet = ended.enter_context(Fleet(folder))
        (port,) = free_ports(1)
        (folder / "prometheus.yml").write_text(json.dumps(_scrapes(fleet.ports)))  # JSON is YAML
        config, data = f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"
        server = Process(prometheus, config, data, f"--web.listen-address=127.0.0.1:{port}", interpreter=False)
        ended.callback(server.end)
        ended.callback(server.popen.terminate)
        fleet.live()
        asked = Asked(port, fleet.start, fleet.start + SECONDS)
        page = folder / "dashboard.html"
        page.write_text(_page(json.loads(DASHBOARD.read_text("utf-8")), asked))
        _photograph(page, ended.enter_context(Browser(folder)))
    print(f"{IMAGE}: {IMAGE.stat().st_size / 1e3:.0f} kB")


def _scrapes(ports: dict[str, int]) -> dict[str, Any]:
    """Each page under the name that its host would have."""
    targets = [{"targets": [f"127.0.0.1:{ports[host]}"], "labels": {"instance": f"{host}:9400"}} for host in ports]
    often = {"scrape_interval": f"{SCRAPE}s", "scrape_timeout": f"{SCRAPE}s"}
    return {"global": often, "scrape_configs": [{"job_name": "mx", "static_configs": targets}]}


def _page(dashboard: dict[str, Any], asked: Asked) -> str:
    panels = []
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        place = f"grid-area: {at['y'] + 1} / {at['x'] + 1} / span {at['h']} / span {at['w']}"
        title = html.escape(panel["title"])
        if panel["type"] == "row":
            panels.append(f'<h2 style="{place}">{title}</h2>')
            continue
        series = [found for target in panel["targets"] for found in asked.series(target)]
        if not any(value is not None for _, values in series for value in values) and panel["title"] not in QUIET:
            sys.exit(f"{panel['title']}: no data")
        figure = {"stat": _number, "bargauge": _bars, "timeseries": _lines}[panel["type"]](panel, series, asked)
        figure.update_layout(
            template="plotly_white", margin={"l": 6, "r": 10, "t": 6, "b": 4}, font={"size": 11, "color": "#24292f"}
        )
        drawn = figure.to_html(full_html=False, include_plotlyjs=False, config={"staticPlot": True}, default_height="100%")
        names = "".join(
            f'<span><i style="background: {_colour(number)}"></i>{html.escape(name)}</span>'
            for number, (name, _) in enumerate(series)
        )
        # before the plot, which takes the room that is left when it is drawn
        legend = f"<p>{names}</p>" if panel["type"] == "timeseries" else ""
        panels.append(f'<section style="{place}"><h3>{title}</h3>{legend}<div class="plot">{drawn}</div></section>')
    return f'<!doctype html><meta charset="utf-8"><style>{STYLE}</style><script>{library()}</script>{"".join(panels)}'


def _unit(panel: dict[str, Any]) -> tuple[str, str]:
    """How plotly writes the panel's unit."""
    unit = panel["fieldConfig"]["defaults"].get("unit")
    return UNITS[unit] if unit else ("~g", "")


def _number(panel: dict[str, Any], series: list[Any], _: Asked) -> graph.Figure:
    value = series[0][1][0] if series else None
    shape, after = _unit(panel)
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    ink = INKS[[step["color"] for step in steps if step["value"] is None or (value is not None and value >= step["value"])][-1]]
    font = {"size": 30, "color": ink}
    if value is None:
        text = panel["fieldConfig"]["defaults"]["noValue"]
        empty = graph.Figure(layout={"xaxis": {"visible": False}, "yaxis": {"visible": False}})
        return empty.add_annotation(text=text, font=font, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper")
    return graph.Figure(graph.Indicator(value=value, number={"valueformat": shape, "suffix": after, "font": font}))


def _bars(panel: dict[str, Any], series: list[Any], _: Asked) -> graph.Figure:
    names, values = [name for name, _ in series], [values[0] for _, values in series]
    figure = graph.Figure(graph.Bar(x=values, y=names, orientation="h", marker_color=COLOURS[0], cliponaxis=False))
    shape, after = _unit(panel)
    figure.update_traces(textposition="outside", texttemplate=f" %{{x:{shape}}}{after}")
    figure.update_xaxes(visible=False, rangemode="tozero")
    return figure.update_yaxes(autorange="reversed", automargin=True, ticksuffix=" ")


def _lines(panel: dict[str, Any], series: list[Any], asked: Asked) -> graph.Figure:
    look = panel["fieldConfig"]["defaults"]["custom"]
    stacked, bars = "stacking" in look, look.get("drawStyle") == "bars"
    x = [round(at - asked.start) for at in asked.times]
    figure = graph.Figure(layout={"barmode": "stack", "bargap": 0.15, "showlegend": False})
    for number, (_, values) in enumerate(series):
        line = {"color": _colour(number), "width": 1 if stacked else 1.5}
        if bars:
            figure.add_bar(x=x, y=values, marker_color=_colour(number))
        elif stacked:
            known = [(at, value) for at, value in zip(x, values, strict=True) if value is not None]
            figure.add_scatter(
                x=[at for at, _ in known], y=[value for _, value in known], mode="lines", line=line, stackgroup="all"
            )
        else:
            figure.add_scatter(
                x=x, y=values, mode="lines+markers", line=line, marker={"size": 3}, connectgaps=look["spanNulls"]
            )
    shape, after = _unit(panel)
    figure.update_yaxes(tickformat=shape, ticksuffix=after, rangemode="tozero", nticks=5, automargin=True)
    ticks = {"tick0": 0, "dtick": 30, "ticksuffix": "s", "ticks": "outside", "ticklen": 5, "tickcolor": "white"}
    return figure.update_xaxes(range=[0, x[-1] + STEP / 2], automargin=True, showgrid=False, **ticks)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _photograph(page: Path, browser: Browser) -> None:
    opened = browser.open(page, width=WIDTH + 2 * GAP, height=900)
    opened.wait("[...document.querySelectorAll('.plotly-graph-div')].every(plot => plot.querySelector('.main-svg'))")
    opened.call("Emulation.setDeviceMetricsOverride", width=WIDTH + 2 * GAP, height=900, deviceScaleFactor=1.5, mobile=False)
    image = Image.open(io.BytesIO(opened.picture(whole=True))).convert("RGB")
    image.quantize(128).save(IMAGE, optimize=True)


if __name__ == "__main__":
    main()
