"""What is counted is bounded, has the names Prometheus wants, and never stops what it counts."""

from __future__ import annotations

import logging
import math
import re
import threading
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mx_common import metrics
from mx_common._metric import Age, Counter, Gauge, Histogram, Label, Table
from mx_common._policies import BUILT_IN
from mx_common.directory.versions import State
from mx_common.errors import ConfigError
from mx_common.refit.engine import PATHS
from mx_common.selection import DropKind
from mx_common.wire import p2p

ROWS = list(metrics.TABLE.metrics.values())


def shown(table, **more):
    """{(series, labels): value} as a scraper reads it."""

    class Registered:
        def collect(self):
            return table.families(more)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Registered())
    text = generate_latest(registry).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


def made(kind, name, *labels, **how):
    table = Table()
    return table, table.add(kind(name, "what it means", *labels, **how))


@pytest.mark.parametrize("metric", ROWS, ids=lambda metric: metric.name)
def test_a_metric_has_a_base_unit_a_meaning_and_no_label_of_the_page(metric):
    endings = {"counter": ("_total",), "histogram": ("_seconds", "_bytes_per_second")}
    endings["gauge"] = ("_seconds", "_per_second", "_ratio", "_in_flight", "_sources", "_versions", "_version")
    assert metric.name.endswith(endings[metric.kind])
    assert not re.search(r"milli|_ms\b|gbps|_mb", metric.name)
    assert len(metric.meaning) > 20
    assert not metric.meaning.endswith(".")
    assert not {label.name for label in metric.labels} & {*metrics.COMMON_LABELS, "instance", "job", "le"}


def values(metric, label):
    (found,) = [one.values for one in metric.labels if one.name == label]
    return found


def test_the_fixed_values_are_those_that_the_code_has():
    assert values(metrics.SELECTIONS, "policy") == tuple(BUILT_IN)
    assert values(metrics.TRANSFERS, "path") == ("load", *PATHS)
    assert values(metrics.REFITS, "path") == PATHS
    assert values(metrics.LOAD_CANDIDATES, "outcome") == ("ordered", *get_args(DropKind))
    assert values(metrics.DIRECTORY_VERSIONS, "state") == tuple(state.name for state in State)
    statuses = tuple(name.removeprefix("SOURCE_STATUS_") for name in dict(p2p.SourceStatus.items()))
    assert values(metrics.DIRECTORY_SOURCES, "status") == statuses


anything = st.one_of(st.text(max_size=50), st.none(), st.integers(), st.floats(), st.binary(max_size=3))
numbers = st.one_of(st.floats(), st.integers(min_value=-5, max_value=10**400), st.none(), st.text(max_size=3))


@given(st.lists(st.tuples(anything, anything, numbers), max_size=80))
def test_whatever_is_counted_nothing_is_raised_and_the_series_are_few(events):
    table = Table()
    labels = (Label("verdict", ("ok", "slow")), Label("engine", most=4))
    counter = table.add(Counter("mx_a_total", "a", *labels))
    gauge = table.add(Gauge("mx_b", "b", *labels))
    histogram = table.add(Histogram("mx_c", "c", *labels, bounds=(1.0, 2.0)))
    for verdict, engine, number in events:
        counter.add(number, verdict=verdict, engine=engine)
        gauge.set(number if isinstance(number, float) else 0.0, verdict=verdict, engine=engine)
        histogram.observe(number, verdict=verdict, engine=engine)
    samples = shown(table, process="0")
    for name in ("mx_a_total", "mx_b", "mx_c_count"):
        assert len([key for key in samples if key[0] == name]) <= 3 * 5
    assert all(value >= 0 for (name, _), value in samples.items() if name != "mx_b")
    engines = {dict(key)["engine"] for _, key in samples}
    assert all(re.fullmatch(r"[\w.+-]{1,40}", engine) for engine in engines)


@pytest.mark.parametrize("labels", [{}, {"verdict": "ok", "more": "x"}, {"verdikt": "ok"}])
def test_a_wrong_label_is_one_warning_and_no_exception(labels, caplog):
    table, counter = made(Counter, "mx_a_total", Label("verdict", ("ok",)))
    with caplog.at_level(logging.WARNING):
        counter.add(**labels)
        counter.add(**labels)
    assert len([r for r in caplog.records if "mx_a_total is not counted" in r.getMessage()]) == 1
    assert set(shown(table).values()) == {0.0}


def test_a_value_that_is_not_known_is_other_and_an_empty_one_is_none():
    table, counter = made(Counter, "mx_a_total", Label("reason", ("none", "late")), Label("engine", most=2))
    for reason, engine in [("late", "a"), ("", ""), (None, None), ("early", "b"), ("early", "c"), ("late", "x y")]:
        counter.add(reason=reason, engine=engine)
    found = {(dict(key)["reason"], dict(key)["engine"]): value for (_, key), value in shown(table).items()}
    assert found == {("late", "a"): 1, ("none", "none"): 2, ("other", "other"): 2, ("late", "other"): 1}


def test_a_counter_of_few_series_is_shown_before_it_counts_and_one_of_many_is_not():
    few, _ = made(Counter, "mx_a_total", Label("outcome", ("ok", "failed")))
    assert shown(few) == {("mx_a_total", (("outcome", "failed"),)): 0, ("mx_a_total", (("outcome", "ok"),)): 0}
    many, _ = made(Counter, "mx_a_total", Label("engine"))
    assert shown(many) == {}


def test_a_histogram_has_cumulated_buckets_whose_bounds_belong_to_them():
    table, histogram = made(Histogram, "mx_a_seconds", bounds=(1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 3.0, -1.0, math.nan, math.inf, None):
        histogram.observe(value)
    found = {(name, dict(key).get("le")): value for (name, key), value in shown(table).items()}
    buckets = {("mx_a_seconds_bucket", le): count for le, count in (("1.0", 2), ("2.0", 4), ("+Inf", 5))}
    assert found == {**buckets, ("mx_a_seconds_count", None): 5, ("mx_a_seconds_sum", None): 7.5}


def test_a_gauge_without_a_reading_is_not_shown_and_those_who_are_asked_are_added_up():
    table, gauge = made(Gauge, "mx_a", Label("state", ("on", "off")))
    gauge.set(3, state="on")
    gauge.set(None, state="on")
    assert shown(table) == {}
    stop = [gauge.ask(lambda: {"on": 2, "off": 1}), gauge.ask(lambda: {"on": 5, "asleep": 1}), gauge.ask(lambda: 1 / 0)]
    found = {dict(key)["state"]: value for (_, key), value in shown(table).items()}
    assert found == {"on": 7, "off": 1, "other": 1}
    for one in (*stop, *stop):
        one()
    assert shown(table) == {}


def test_an_age_grows_from_when_it_was_marked():
    table, age = made(Age, "mx_a_age_seconds", Label("event", ("fire",)))
    assert shown(table) == {}
    age.mark(event="fire")
    (first,) = shown(table).values()
    (second,) = shown(table).values()
    assert 0 <= first <= second


def test_labels_of_the_page_are_on_every_sample_and_empty_ones_are_left_out():
    samples = shown(metrics.TABLE, process="3", rank="")
    assert samples
    assert all(("process", "3") in labels and "rank" not in dict(labels) for _, labels in samples)


@pytest.mark.parametrize(("said", "shown_rank"), [((), ""), ((3, None, 3), "3"), ((3, 4, 3), "several")])
def test_a_process_is_one_rank_or_says_that_it_is_several(said, shown_rank, monkeypatch):
    monkeypatch.setattr(metrics, "_rank", "")
    for rank in said:
        metrics.serve(rank)
    assert metrics._rank == shown_rank


def test_threads_lose_no_count():
    table, counter = made(Counter, "mx_a_total", Label("engine"))
    threads = [threading.Thread(target=lambda: [counter.add(engine="x") for _ in range(1000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(shown(table).values()) == [8000]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Counter("mx_a", "a"),
        lambda: Gauge("a", "a"),
        lambda: Gauge("mx_A", "a"),
        lambda: Label("Verdict"),
        lambda: Histogram("mx_a", "a", bounds=()),
        lambda: Histogram("mx_a", "a", bounds=(2.0, 1.0)),
        lambda: metrics.TABLE.add(Gauge("mx_source_load_ratio", "again")),
    ],
)
def test_a_row_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        wrong()
