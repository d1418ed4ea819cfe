"""What a load leaves on the metrics page and in a trace: real sources, real NIXL, a real scrape."""

from __future__ import annotations

import os
import time

import pytest

from mx_common import metrics
from mx_common.errors import LoadFailed
from mx_common.load import Source, load
from tests.support.toy import ToyEngine, job, log, policy_that_prefers
from tests.support.traces import parents, traced  # noqa: F401  a fixture


def test_a_load_is_counted_from_its_candidates_to_its_rate(start_source, page, records, monkeypatch):
    monkeypatch.setenv("MX_RESHARD_MIN_GBPS", "0.000001")
    monkeypatch.setenv("MX_FLOOR_MIN_BYTES", "0")
    start_source("bad", edit="digest")
    start_source("other-rank", rank=1)
    start_source("good")
    with policy_that_prefers("bad"):
        load(job("target", selector="prefer"), ToyEngine(), log).transport.close()
    seen = page()

    (record,) = [r for r in records() if r["verdict"] == "ok"]
    who = {"path": "load", "engine": "toy", "framework": "toy"}
    assert seen.value("mx_transfers_total", verdict="ok", reason="none", floor="armed", **who) == 1
    assert seen.value("mx_transfers_total") == len(records())
    assert seen.value("mx_transfer_bytes_total", **who) == record["wire_bytes"]
    rate = seen.value("mx_transfer_last_bytes_per_second", path="load")
    assert rate * 8 / 1e9 == pytest.approx(record["implied_gbps"], abs=0.06)
    assert seen.value("mx_transfer_bytes_per_second_sum") == pytest.approx(rate)
    assert seen.value("mx_transfer_seconds_sum", path="load") == pytest.approx(record["wire_s"], abs=1e-5)
    assert seen.value("mx_transfer_floor_bytes_per_second", path="load") == pytest.approx(125)
    assert seen.value("mx_load_candidates_total", outcome="ordered") == 2
    assert seen.value("mx_load_candidates_total", outcome="rank") == 1
    assert seen.value("mx_load_candidates_total") == 3
    assert seen.value("mx_load_attempts_total", outcome="DigestMismatch") == 1
    assert seen.value("mx_load_attempts_total", outcome="ok") == 1
    assert seen.value("mx_load_attempts_total") == 2
    assert seen.value("mx_selections_total", path="load", policy="other") == 1  # a policy that is not of this pack
    assert seen.value("mx_load_seconds_count", outcome="source") == 1
    assert all(seen.value("mx_load_stage_seconds_total", stage=stage) > 0 for stage in ("plan", "connect", "wire", "verify"))
    assert {row["rank"] for row, _ in seen.rows("mx_load_attempts_total")} == {"0"}
    values = {value for _, labels in seen.samples for _, value in labels}
    assert not values & {"toy/model", "target", "good", "bad", "other-rank", "prefer", "127.0.0.1", os.uname().nodename}


def test_the_page_has_every_metric_of_the_table_and_no_other(directory, page):
    load(job("target"), ToyEngine(storage_seed=1), log)
    families = {family.name: family.type for family in page().families}
    assert families == {name.removesuffix("_total"): metric.kind for name, metric in metrics.TABLE.metrics.items()}


def test_storage_as_the_first_and_as_a_fallback_are_not_the_same(start_source, page):
    load(job("first"), ToyEngine(storage_seed=1), log)
    assert page().rows("mx_event_age_seconds") == []
    start_source("bad", edit="digest")
    load(job("second"), ToyEngine(storage_seed=1), log)
    load(job("third", refused="it is quantised"), ToyEngine(storage_seed=1), log)
    with pytest.raises(LoadFailed):
        load(job("fourth"), ToyEngine(), log)
    seen = page()
    outcomes = {row["outcome"]: value for row, value in seen.rows("mx_load_seconds_count")}
    assert outcomes == {"first": 1, "fallback": 1, "not_shared": 1, "failed": 1}
    assert seen.value("mx_transfers_total", verdict="unmeasured", reason="no_bytes") == 2
    assert [row["event"] for row, _ in seen.rows("mx_event_age_seconds")] == ["storage_fallback"]


def test_a_source_counts_its_heartbeats_and_the_directory_what_it_knows_and_answers(page, directory):
    mine = job("w1")
    loaded = load(mine, ToyEngine(storage_seed=1), log)
    source = Source.start(mine, loaded, ready=lambda: True, serving=None, log=log)
    assert source.publisher.wait_ready(30)
    seen = page()
    assert seen.value("mx_heartbeats_total", outcome="registered") == 1
    assert seen.value("mx_heartbeats_total", outcome="sent") >= 1
    assert seen.value("mx_directory_sources", status="READY") == 1
    assert seen.value("mx_directory_sources") == 1
    assert seen.rows("mx_directory_versions") != []
    assert seen.value("mx_source_reads_in_flight") == 0
    assert seen.value("mx_directory_requests_total", method="PublishMetadata", code="OK") == 1
    assert seen.value("mx_directory_requests_total", method="UpdateStatus", code="OK") >= 1
    directory.stop()
    while not seen.value("mx_heartbeats_total", outcome="failed"):
        time.sleep(0.1)
        seen = page()
    assert seen.rows("mx_directory_sources") == []
    source.close()


def test_an_impossible_rate_is_counted_and_its_time_kept(start_source, page, monkeypatch):
    monkeypatch.setenv("MX_RESHARD_MAX_GBPS", "0.000001")
    start_source("w1")
    load(job("target"), ToyEngine(storage_seed=1), log)
    seen = page()
    assert seen.value("mx_transfers_total", verdict="impossible") == 1
    assert seen.value("mx_load_attempts_total", outcome="ImpossibleThroughput") == 1
    assert {row["event"] for row, _ in seen.rows("mx_event_age_seconds")} == {"impossible", "storage_fallback"}


def test_a_load_is_a_trace_of_attempts_and_their_stages(start_source, traced):  # noqa: F811
    start_source("bad", edit="digest")
    start_source("good")
    with policy_that_prefers("bad"):
        load(job("target", selector="prefer"), ToyEngine(), log).transport.close()
    spans = traced()
    (whole,) = [s for s in spans if s.name == "mx.load"]
    failed, good = [s for s in spans if s.name == "mx.attempt"]
    assert parents(spans) == {
        "mx.load": {None},
        "mx.attempt": {"mx.load"},
        **{stage: {"mx.attempt"} for stage in ("mx.plan", "mx.connect", "mx.wire", "mx.verify")},
    }
    assert {s.context.trace_id for s in spans} == {whole.context.trace_id}
    assert dict(whole.attributes) == {
        "mx.model": "toy/model",
        "mx.engine": "toy",
        "mx.rank": 0,
        "mx.worker_id": "target",
        "mx.outcome": "source",
        "mx.source_worker_id": "good",
    }
    assert (failed.attributes["mx.source_worker_id"], failed.status.status_code.name) == ("bad", "ERROR")
    assert failed.status.description.startswith("DigestMismatch: 1 of 8 tensors differ")
    assert [event.attributes["exception.type"].rpartition(".")[2] for event in failed.events] == ["DigestMismatch"]
    assert (good.attributes["mx.source_worker_id"], good.status.status_code.name) == ("good", "UNSET")
    assert (good.attributes["mx.wire_bytes"], good.attributes["mx.policy"], good.attributes["mx.verified"]) == (
        sum(t.nbytes for t in ToyEngine().build().values()),
        "prefer",
        True,
    )


def test_a_load_that_gives_nothing_is_a_trace_with_its_error(directory, traced):  # noqa: F811
    with pytest.raises(LoadFailed):
        load(job("target"), ToyEngine(), log)
    (whole,) = traced()
    assert (whole.name, whole.status.status_code.name) == ("mx.load", "ERROR")
    assert "no weights for toy/model rank 0" in whole.status.description
