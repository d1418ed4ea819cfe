"""`--load-format mx` in real vLLM engines: tokens equal to those of transformers, whoever gave the weights."""

from __future__ import annotations

import pytest

from tests.support.engine_scenarios import (
    a_directory_that_is_lost,
    a_replica_without_weight_files,
    another_parallel_layout,
    sources_that_fail,
    tokens,
    two_ranks,
)
from tests.support.fleet import START_SECONDS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_a_replica_without_weight_files_gives_the_tokens_of_transformers(fleet, small_model):
    a_replica_without_weight_files(fleet, small_model, "vllm")


def test_two_ranks_each_take_the_weights_of_the_same_rank(fleet, small_model):
    two_ranks(fleet, small_model)


def test_a_replica_of_another_parallel_layout_does_not_take_them(fleet, small_model):
    another_parallel_layout(fleet, small_model)


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


def test_sources_that_overwrite_are_killed_or_stop_are_told_from_a_clean_load(fleet, small_model):
    sources_that_fail(fleet, small_model)


def test_without_its_directory_a_replica_reads_from_storage_and_says_so(fleet, small_model):
    a_directory_that_is_lost(fleet, small_model)


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
