"""A target takes its weights from a source, whole and verified, or says why not: real directory, real processes, real NIXL."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from mx_common.errors import LoadFailed
from mx_common.load import Loaded, Source, load
from tests.support.toy import ToyEngine, holds, job, log


def test_a_target_takes_the_weights_from_a_source_and_the_record_says_so(start_source, records):
    start_source("w1", seed=5, nbytes=16 << 20)
    engine = ToyEngine(nbytes=16 << 20)

    loaded = load(job("target"), engine, log)

    assert holds(loaded.tensors, 5, nbytes=16 << 20)
    assert loaded.source_worker_id == "w1"
    assert engine.from_storage == 0
    (record,) = records()
    assert record["path"] == "load"
    assert record["source_worker_id"] == "w1"
    assert record["verified"] is True
    assert record["verdict"] == "ok"
    assert record["wire_bytes"] == sum(t.nbytes for t in loaded.tensors.values())
    assert record["transport"].startswith("ucx:")
    loaded.transport.close()


def test_a_target_that_loaded_from_a_source_then_serves_the_next_one(start_source):
    first = start_source("w1", seed=2)
    loaded = load(job("w2"), ToyEngine(), log)
    second = Source.start(job("w2"), loaded, ready=lambda: True, serving=None, log=log)
    assert second.publisher.wait_ready(10)
    first.tell("exit")
    first.expect("closed")

    chained = load(job("w3"), ToyEngine(), log)

    assert chained.source_worker_id == "w2"
    assert holds(chained.tensors, 2)
    chained.transport.close()
    second.close()


def test_without_any_source_the_weights_come_from_storage(directory):
    engine = ToyEngine(storage_seed=3)
    loaded = load(job("target"), engine, log)
    assert loaded.pulled is None
    assert holds(loaded.tensors, 3)
    assert engine.built == 0


def test_with_fallback_none_a_load_without_sources_stops_and_does_not_touch_storage(directory):
    engine = ToyEngine(storage_seed=3)
    with pytest.raises(LoadFailed, match="storage is not tried"):
        load(job("target", fallback="none"), engine, log)
    assert engine.from_storage == 0


def test_where_nothing_is_listed_the_models_that_there_are_sources_of_are_named(start_source):
    start_source("w1")
    for wanted, said in [
        (
            job("target", model="/data/copy-of-it", fallback="none"),
            "but some of toy/model (MX_MODEL_NAME makes two paths one model)",
        ),
        (
            replace(job("target", fallback="none"), identity=replace(job("t").identity, dtype="float16")),
            "but some of toy/model in another one (`mx explain toy/model` shows it)",
        ),
    ]:
        with pytest.raises(LoadFailed) as failure:
            load(wanted, ToyEngine(), log)
        assert f"no source of this identity is listed, {said}" in str(failure.value)


def test_no_weights_anywhere_names_everything_that_was_tried_in_order(start_source):
    start_source("w1", edit="digest")
    start_source("w2", edit="missing")
    with pytest.raises(LoadFailed) as failure:
        load(job("target", selector="rendezvous_hash"), ToyEngine(), log)
    text = str(failure.value)
    assert "toy/model rank 0" in text
    assert "(1) source 1, worker w" in text
    assert "(2) source 2, worker w" in text
    assert "DigestMismatch" in text
    assert "the source lacks layers.0.weight" in text
    assert text.index("source 2") < text.index("then storage: FileNotFoundError: no weight files in /models/toy")


def test_one_line_says_candidates_policy_order_and_why_each_was_dropped(start_source, caplog):
    start_source("good")
    start_source("other-rank", rank=1)
    with caplog.at_level(logging.INFO):
        loaded = load(job("target", selector="load_aware"), ToyEngine(), log)
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("sources of")]
    assert line == (
        "sources of toy/model: 2 listed, policy load_aware, order [good (load 0.00)], dropped [other-rank: rank 1, wanted 0]"
    )
    loaded.transport.close()


def test_at_most_max_sources_are_tried(start_source):
    for number in range(3):
        start_source(f"w{number}", edit="retyped")
    engine = ToyEngine(storage_seed=9)
    loaded = load(job("target", max_sources=2), engine, log)
    assert [reason.split(",")[0] for reason in loaded.reasons] == ["source 1", "source 2"]
    assert holds(loaded.tensors, 9)


def test_a_model_that_may_not_be_shared_is_read_from_storage_and_not_published(start_source, caplog):
    start_source("w1")
    refused = job("target", refused="it is quantised")
    loaded = load(refused, ToyEngine(storage_seed=4), log)
    assert holds(loaded.tensors, 4)
    assert loaded.reasons == ("not shared between replicas: it is quantised",)
    assert Source.start(refused, loaded, ready=lambda: True, serving=None, log=log) is None
    assert "does not serve its weights to others: it is quantised" in caplog.text


def test_two_targets_on_one_node_load_at_once_and_both_are_whole(start_source, tmp_path):
    import threading

    start_source("w1", seed=6, nbytes=16 << 20)
    results = {}

    def run(name):
        results[name] = load(job(name), ToyEngine(nbytes=16 << 20), log)

    threads = [threading.Thread(target=run, args=(f"t{n}",)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == ["t0", "t1"]
    for loaded in results.values():
        assert holds(loaded.tensors, 6, nbytes=16 << 20)
        assert loaded.source_worker_id == "w1"
        loaded.transport.close()


def test_a_source_that_never_became_ready_is_not_used(start_source):
    start_source("starting", ready=False)
    loaded = load(job("target"), ToyEngine(storage_seed=1), log)
    assert loaded.pulled is None


def test_without_digest_verification_the_record_says_unverified(start_source, records):
    start_source("w1", seed=8, nbytes=16 << 20)
    loaded = load(job("target", verify_digest=False), ToyEngine(nbytes=16 << 20), log)
    assert holds(loaded.tensors, 8, nbytes=16 << 20)
    assert records()[0]["verified"] is False
    loaded.transport.close()


def test_a_source_that_publishes_no_digests_is_used_and_recorded_as_unverified(start_source, records):
    start_source("w1", seed=8, edit="no-digests")
    loaded = load(job("target"), ToyEngine(), log)
    assert holds(loaded.tensors, 8)
    assert records()[0]["verified"] is False
    loaded.transport.close()


def test_published_digests_are_those_of_the_content(directory):
    served = Source.start(
        job("w1"), Loaded(ToyEngine(storage_seed=1).load_from_storage()), ready=lambda: True, serving=None, log=log
    )
    from mx_common.load import tensor_digest

    assert served.table.digested
    assert [tensor_digest(t) for t in served.table.held] == served.table.digest.tolist()
    served.close()
