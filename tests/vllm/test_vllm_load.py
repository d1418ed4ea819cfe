"""`--load-format mx` in real vLLM engines: tokens equal to those of transformers, whoever gave the weights."""

from __future__ import annotations

import json

import pytest

from tests.vllm.conftest import MODEL, START_SECONDS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def tokens(process):
    return json.loads(process.expect("tokens", START_SECONDS))


def test_a_replica_without_weight_files_gives_the_tokens_of_transformers(fleet, small_model):
    full, bare, expected = small_model
    source = fleet.engine(full)
    assert tokens(source) == expected
    (first,) = fleet.ready()

    target = fleet.engine(bare)
    assert tokens(target) == expected
    records = fleet.records()
    assert [record["source_worker_id"] for record in records] == [first.worker_id]
    assert records[0]["verified"] is True
    assert records[0]["engine"] == "vllm"
    assert len({ref.mx_source_id for ref in fleet.ready(2)}) == 1, "the target has become a source of the same identity"

    source.tell("ask")
    assert tokens(source) == expected, "being read from leaves a source as it was"


def test_two_ranks_each_take_the_weights_of_the_same_rank(fleet, small_model):
    full, bare, expected = small_model
    source = fleet.engine(full, tp=2)
    assert tokens(source) == expected
    ranks = {ref.worker_id: ref.worker_rank for ref in fleet.ready(2)}
    assert sorted(ranks.values()) == [0, 1]

    target = fleet.engine(bare, tp=2)
    assert tokens(target) == expected
    records = fleet.records()
    assert sorted(record["rank"] for record in records) == [0, 1]
    for record in records:
        assert ranks[record["source_worker_id"]] == record["rank"]
        assert record["world"] == 2
    fleet.ready(4)


def test_a_replica_of_another_parallel_layout_does_not_take_them(fleet, small_model):
    full, _, expected = small_model
    assert tokens(fleet.engine(full)) == expected
    fleet.ready()
    assert tokens(fleet.engine(full, tp=2)) == expected
    assert fleet.records() == [], "read from storage: identities differ"


def test_a_replica_of_another_configuration_does_not_take_them_and_a_reloaded_one_gives_none(fleet, small_model):
    full, _, expected = small_model
    source = fleet.engine(full)
    assert tokens(source) == expected
    (first,) = fleet.ready()

    other = {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}}
    assert tokens(fleet.engine(full, options=other)) != expected, "its rotary table is its own"
    assert fleet.records() == []
    assert len({ref.mx_source_id for ref in fleet.ready(2)}) == 2

    source.tell("reload")
    source.expect("reloaded", START_SECONDS)
    assert any("stops being a source" in line for line in source.lines)
    assert first.worker_id not in {ref.worker_id for ref in fleet.ready(1)}
    source.tell("ask")
    assert tokens(source) == expected


def test_settings_given_to_the_loader_override_the_environment(fleet, small_model, free_port):
    full, bare, expected = small_model
    assert tokens(fleet.engine(full)) == expected
    fleet.ready()
    elsewhere = {"MX_SERVER_ADDRESS": f"127.0.0.1:{free_port}", "MX_P2P_SOURCE_SELECTOR": "load_aware"}
    target = fleet.engine(bare, env=elsewhere, extra={"server": fleet.address, "selector": "rendezvous_hash"})
    assert tokens(target) == expected
    assert [record["policy"] for record in fleet.records()] == ["rendezvous_hash"]


def test_after_a_source_with_wrong_bytes_the_same_process_reads_clean_weights_from_storage(fleet, small_model):
    full, bare, expected = small_model
    truth = fleet.engine(full)
    assert tokens(truth) == expected
    fleet.ready()
    liar = fleet.start("tests.support.liar", {"model": MODEL, "directory": fleet.address})
    liar.expect("ready")
    truth.end()

    target = fleet.engine(full)
    assert tokens(target) == expected
    assert any("DigestMismatch" in line for line in target.lines)

    lost = fleet.engine(bare, env={"MX_P2P_SOURCE_SELECTOR": "rendezvous_hash"})
    target.end()
    failure = lost.expect("failed", START_SECONDS)
    assert "LoadFailed" in failure
    assert f"no weights for {MODEL} rank 0" in failure
    assert "worker liar: DigestMismatch" in failure or "DigestMismatch" in failure
    assert failure.index("DigestMismatch") < failure.index("then storage")


def test_with_patches_disabled_the_engine_serves_and_says_why_it_is_no_source(fleet, small_model):
    full, _, expected = small_model
    engine = fleet.engine(full, env={"MX_DISABLE_PATCHES": "1"})
    assert tokens(engine) == expected
    (line,) = [line for line in engine.lines if "does not serve its weights to others" in line]
    assert "vLLM packs weights on CPU, and patch vllm-keep-weights is disabled" in line


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"selecter": "balanced"}, "unknown loader setting 'selecter'; known: server, selector"),
        ({"max_sources": "two"}, "must be of type int"),
    ],
)
def test_a_bad_loader_setting_stops_the_engine_and_lists_what_is_known(fleet, small_model, extra, says):
    failed = fleet.engine(small_model[0], extra=extra)
    failed.output(START_SECONDS)
    assert any(says in line for line in failed.lines)
