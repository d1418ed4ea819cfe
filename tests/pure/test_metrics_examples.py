"""The dashboard and the alert rules ask for nothing that the pack does not count."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from mx_common import metrics
from mx_common._metric import Counter, Label, Table
from tests.support.promql import problems, used

EXAMPLES = Path(__file__).parents[2] / "examples"
DASHBOARD = json.loads((EXAMPLES / "grafana" / "mx-dashboard.json").read_text("utf-8"))
ALERTS = yaml.safe_load((EXAMPLES / "prometheus" / "alerts.yml").read_text("utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
TARGETS = [(panel["title"], target) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_there_is_and_says_what_to_do(rule):
    wrong, labels = used(rule["expr"], metrics.TABLE)
    assert wrong == []
    texts = rule["annotations"]
    assert len(texts["description"]) > 40
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(re.findall(r"\$labels\.(\w+)", texts["summary"] + texts["description"])) <= labels


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_panel_asks_for_what_there_is(title, target):
    wrong, labels = used(target["expr"], metrics.TABLE)
    assert wrong == []
    assert set(re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"])) <= labels


def test_the_dashboard_shows_every_metric():
    shown = " ".join(target["expr"] for _, target in TARGETS)
    missing = [m.name for m in metrics.TABLE.metrics.values() if not any(name in shown for name in m.series_names)]
    assert missing == ["mx_transfer_seconds", "mx_refit_seconds"]  # their rates and stages are


def test_the_dashboard_fits_its_grid_and_finds_its_hosts():
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    (query,) = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    name = re.fullmatch(r"label_values\((\w+), instance\)", query)[1]
    row = metrics.TABLE.metrics[name]
    at_rest = Table()
    at_rest.add(type(row)(row.name, row.meaning, *row.labels))
    assert at_rest.families({})[0].samples, "a host is listed once its page is up, whatever has happened there"


@pytest.mark.parametrize(
    "panel", [p for p in DASHBOARD["panels"] if p["type"] in ("stat", "bargauge")], ids=lambda p: p["title"]
)
def test_what_never_happened_is_no_alarm_and_a_count_is_none(panel):
    look = panel["fieldConfig"]["defaults"]
    steps = look["thresholds"]["steps"]
    assert steps[0] in ({"color": "green", "value": None}, {"color": "blue", "value": None})  # also of a panel without a value
    if panel["type"] == "bargauge":
        # otherwise Grafana leaves out the shortest bar, and paints those above 80 red
        assert (look["min"], len(steps)) == (0, 1)


def test_the_scrape_configuration_loads_the_rules():
    scrape = yaml.safe_load((EXAMPLES / "prometheus" / "prometheus.yml").read_text("utf-8"))
    assert [(EXAMPLES / "prometheus" / name).is_file() for name in scrape["rule_files"]] == [True]
    assert scrape["scrape_configs"][0]["static_configs"][0]["targets"]


def table():
    made = Table()
    made.add(Counter("mx_things_total", "things", Label("verdict", ("ok", "slow")), Label("engine")))
    return made


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("mx_thing_total", "no series mx_thing_total"),
        ("things_total", "no series things_total"),
        ('mx_things_total{verdct="ok"}', "mx_things_total has no label verdct"),
        ('rate(mx_things_total{verdict="fast"}[5m])', "mx_things_total is never verdict=fast"),
        ('mx_things_total{engine="x", verdict=~"ok|fast"}', "mx_things_total is never verdict=fast"),
        ("sum by (path) (mx_things_total)", "no label path to group by"),
        ("sum(mx_things_total) / ignoring (path) group_left sum(mx_things_total)", "no label path to group by"),
        ("rat(mx_things_total[5m])", "no function rat"),
        ("mx_things_total_bucket", "no series mx_things_total_bucket"),
        ("mx_things_total ? 1", "cannot read '?'"),
    ],
)
def test_a_renamed_metric_label_or_value_would_be_found(expression, problem):
    assert problems(expression, table()) == [problem]


@pytest.mark.parametrize(
    "expression",
    [
        'sum by (engine, instance, rank) (rate(mx_things_total{verdict=~"ok|slow", engine="anything"}[5m])) > 0.5',
        "8 * mx_things_total unless mx_things_total",
        'mx_things_total{verdict="other", process="3"}',
    ],
)
def test_what_there_is_is_no_problem(expression):
    assert problems(expression, table()) == []
