"""`--load-format mx` in real SGLang engines: tokens equal to those of transformers, whoever gave the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine_scenarios import (
    a_directory_that_is_lost,
    a_replica_without_weight_files,
    another_parallel_layout,
    sources_that_fail,
    tokens,
    two_ranks,
)
from tests.support.fleet import MODEL, START_SECONDS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_a_replica_without_weight_files_gives_the_tokens_of_transformers(fleet, small_model):
    source, _ = a_replica_without_weight_files(fleet, small_model, "sglang")

    first = fleet.records()[0]["source_worker_id"]
    source.tell(f"disk {small_model[0]}")
    source.expect("updated True", START_SECONDS)
    assert any("stops being a source" in line for line in source.lines), "SGLang's own updates overwrite what others would read"
    assert first not in {ref.worker_id for ref in fleet.ready()}
    source.tell("ask")
    assert tokens(source) == small_model[2]


def test_two_ranks_of_a_server_each_take_the_weights_of_the_same_rank_of_an_engine(fleet, small_model):
    two_ranks(fleet, small_model, lambda model: fleet.server(model, tp=2).wait_healthy().tokens())


def test_a_replica_of_another_parallel_layout_does_not_take_them(fleet, small_model):
    another_parallel_layout(fleet, small_model)


def test_sources_that_overwrite_are_killed_or_stop_are_told_from_a_clean_load(fleet, small_model):
    sources_that_fail(fleet, small_model)


def test_without_its_directory_a_replica_reads_from_storage_and_says_so(fleet, small_model):
    a_directory_that_is_lost(fleet, small_model)


def test_sglang_and_vllm_share_a_directory_and_no_weights(fleet, small_model):
    full, bare, expected = small_model
    other = fleet.start("tests.support.vllm_engine", {"model": str(full)})
    assert tokens(other) == expected
    (theirs,) = fleet.ready()

    alone = fleet.engine(bare, env={"MX_LOAD_FALLBACK": "none"})
    said = alone.failure(START_SECONDS)
    assert f"no weights for {MODEL} rank 0" in said
    assert "no source of this identity is listed" in said
    assert tokens(fleet.engine(full)) == expected
    assert fleet.records() == []
    assert len({ref.mx_source_id for ref in fleet.ready(2)}) == 2

    mx = Path(sys.executable).parent / "mx"
    command = [mx, "explain", MODEL, "--server", fleet.address, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    groups = json.loads(done.stdout)["groups"]
    assert sorted(group["identity"].split()[0] for group in groups) == ["sglang", "vllm"]
    assert [row["worker_id"] for group in groups for row in group["candidates"]].count(theirs.worker_id) == 1


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"extra": {"selecter": "balanced"}}, "unknown loader setting 'selecter'; known: server, selector"),
        ({"env": {"SGLANG_PLUGINS": "no-such"}}, "'mx' is not a valid LoadFormat"),
    ],
    ids=["an unknown setting", "without the plugin"],
)
def test_what_cannot_load_stops_the_engine_and_says_why(fleet, small_model, spec, says):
    assert says in fleet.engine(small_model[0], **spec).failure(START_SECONDS)
