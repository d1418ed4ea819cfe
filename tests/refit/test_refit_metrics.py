"""What a refit leaves on the metrics page and in a trace."""

from __future__ import annotations

import pytest

from mx_common._timed import SPANS, Stages, timed
from mx_common.errors import MxError, RefitFailed, WeightsBroken
from mx_common.refit.full import receive_full
from tests.support.refit_toy import ToyEngine
from tests.support.traces import parents, traced  # noqa: F401  a fixture

PATHS = pytest.mark.parametrize("path", ["reshard", "staged"])


@PATHS
def test_an_installed_version_is_counted_with_its_stages_and_its_transfer(page, trainer, receive, path):
    source = trainer(2)
    _, receiver = receive(path)
    done = []
    for version in (6, 7):
        source.before_update()
        source.publish(version)
        done.append(receiver.update())
    seen = page()
    assert seen.value("mx_refits_total", path=path, outcome="installed") == 2
    assert seen.value("mx_refits_total") == 2
    assert seen.value("mx_refit_serving_version") == 7
    assert seen.value("mx_refit_seconds_count", path=path) == 2
    spent = {stage: sum(one.seconds.get(stage, 0) for one in done) for one in done for stage in one.seconds}
    counted = {row["stage"]: value for row, value in seen.rows("mx_refit_stage_seconds_total", path=path) if value}
    assert counted == pytest.approx(spent)
    assert seen.value("mx_refit_seconds_sum") == pytest.approx(sum(spent.values()))
    assert seen.value("mx_transfers_total", path=path, engine="toy", framework="toy") == 2
    assert seen.value("mx_transfer_bytes_total", path=path) == sum(one.wire_bytes for one in done)
    assert seen.value("mx_selections_total", path=path, policy="random") >= 1
    assert seen.value("mx_publishes_total", outcome="published") == 4
    assert seen.value("mx_directory_versions", state="READY") == 1


def test_a_version_that_does_not_come_is_counted_by_its_error(page, trainer, receive):
    source = trainer(2)
    source.publish(1, ranks=[0])
    _, receiver = receive()
    with pytest.raises(RefitFailed):
        receiver.prepare(1, timeout=0.2)
    seen = page()
    assert seen.value("mx_refits_total", outcome="failed") == 1
    assert {row["reason"]: n for row, n in seen.rows("mx_refit_failures_total") if n} == {"SourceLost": 1}
    assert [row["event"] for row, _ in seen.rows("mx_event_age_seconds")] == ["refit_failed"]


def test_mixed_weights_are_shown_until_a_whole_version_is_installed(page, trainer, receive):
    source = trainer(1)
    source.publish(1)
    engine, receiver = receive("staged", engine=ToyEngine(lost="norm"))
    with pytest.raises(WeightsBroken):
        receiver.update()
    seen = page()
    assert seen.value("mx_refits_total", path="staged", outcome="broken") == 1
    assert [row["event"] for row, _ in seen.rows("mx_event_age_seconds")] == ["weights_broken"]
    with pytest.raises(RefitFailed):
        receiver.prepare(9, timeout=0.2)
    assert page().value("mx_refits_total", path="staged", outcome="broken") == 2, "the version before it does not serve either"
    engine.lost = ""
    receiver.update()
    assert page().rows("mx_event_age_seconds") == []


@PATHS
def test_a_refit_is_a_trace_from_waiting_to_installing(trainer, receive, traced, path):  # noqa: F811
    trainer(2).publish(7)
    _, receiver = receive(path)
    ready = receiver.prepare()
    ready.install()  # later, as engines of several ranks do it
    spans = traced()
    of_refit = {"mx.wait", "mx.plan", "mx.wire", "mx.verify", "mx.check", "mx.land", "mx.install"}
    of_publish = {"mx.snapshot", "mx.register", "mx.digest", "mx.directory"}
    assert parents(spans) == {
        "mx.publish": {None},
        **{stage: {"mx.publish"} for stage in of_publish},
        "mx.refit": {None},
        **{stage: {"mx.refit"} for stage in of_refit},
    }
    (whole,) = [s for s in spans if s.name == "mx.refit"]
    told = {name: whole.attributes[f"mx.{name}"] for name in ("model", "path", "engine", "rank", "version", "verified")}
    assert told == {"model": "toy/refit", "path": path, "engine": "toy", "rank": 0, "version": 7, "verified": True}
    assert whole.attributes["mx.wire_bytes"] == ready.facts.wire_bytes
    assert {s.status.status_code.name for s in spans} == {"UNSET"}


def test_a_refit_that_fails_is_a_trace_with_its_error_where_it_happened(trainer, receive, traced):  # noqa: F811
    source = trainer(1)
    _, receiver = receive()
    with pytest.raises(RefitFailed):
        receiver.prepare(3, timeout=0.2)
    whole, wait = traced()
    assert (whole.name, wait.name) == ("mx.refit", "mx.wait")
    assert [s.status.status_code.name for s in (whole, wait)] == ["ERROR", "ERROR"]
    assert wait.status.description.startswith("SourceLost: ")
    assert whole.status.description.startswith("RefitFailed: version 3 of toy/refit was not installed: SourceLost")
    source.publish(1)
    with pytest.raises(WeightsBroken):
        receive("staged", engine=ToyEngine(lost="norm"))[1].update()
    (install,) = [s for s in traced() if s.name == "mx.install"]
    assert install.status.description == "RuntimeError: the toy loader fails on norm"


def test_a_provider_that_fails_and_one_that_is_not_there_cost_nothing(trainer, receive, monkeypatch):
    from opentelemetry import trace

    from mx_common import _spans

    trainer(1).publish(1)

    def broken(name):
        raise RuntimeError("no tracer")

    monkeypatch.setattr(trace, "get_tracer", broken)
    assert receive()[1].update().version == 1
    monkeypatch.setattr(_spans, "_api", lambda: None)
    assert receive()[1].update().version == 1


def test_full_tensors_that_do_not_come_are_counted_too(page, trainer):
    trainer(1).publish(1)
    with pytest.raises(MxError):
        list(receive_full("toy/refit", version=3, timeout=0.2))
    assert page().value("mx_refits_total", path="staged", outcome="failed") == 1


def test_a_stage_that_comes_again_and_again_leaves_a_few_spans(traced):  # noqa: F811
    seconds = Stages()
    for _ in range(3 * SPANS):
        with timed(seconds, "wire"):
            pass
    assert [s.name for s in traced()] == SPANS * ["mx.wire"]
    assert seconds.times["wire"] == 3 * SPANS
