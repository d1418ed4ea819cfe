"""What a store selects, keeps and forgets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx_common.directory.records import Heartbeat, Query, Record, select
from mx_common.directory.store import MemoryStore
from mx_common.errors import ConfigError
from mx_common.wire import p2p

READY, STALE, INITIALIZING = p2p.SOURCE_STATUS_READY, p2p.SOURCE_STATUS_STALE, p2p.SOURCE_STATUS_INITIALIZING

RECORD = Record("source", "worker", "m", 0, b"identity", b"worker", INITIALIZING, updated_at=0)

records = st.builds(
    Record,
    mx_source_id=st.sampled_from("ab"),
    worker_id=st.sampled_from("123456"),
    model_name=st.sampled_from(["m", "M", ""]),
    worker_rank=st.integers(0, 2),
    identity=st.just(b""),
    worker=st.just(b""),
    status=st.sampled_from(range(4)),
    updated_at=st.integers(0, 5),
    training_step=st.none() | st.integers(0, 3),
)
queries = st.builds(
    Query,
    mx_source_id=st.none() | st.sampled_from("abc"),
    status=st.none() | st.sampled_from(range(4)),
    model_name=st.none() | st.sampled_from(["m", "M", "", "x"]),
    worker_rank=st.none() | st.integers(0, 3),
    min_training_step=st.none() | st.integers(0, 4),
    min_updated_at=st.none() | st.integers(0, 6),
    limit=st.integers(0, 4),
)


def naive(population, query):
    """The listing by its definition, one filter after the other."""
    left = list(population)
    if query.mx_source_id is not None:
        left = [r for r in left if r.mx_source_id == query.mx_source_id]
    if query.status is not None:
        left = [r for r in left if r.status == query.status]
    if query.model_name is not None:
        left = [r for r in left if r.model_name == query.model_name]
    if query.worker_rank is not None:
        left = [r for r in left if r.worker_rank == query.worker_rank]
    if query.min_training_step is not None:
        left = [r for r in left if r.training_step is not None and r.training_step >= query.min_training_step]
    if query.min_updated_at is not None:
        left = [r for r in left if r.updated_at >= query.min_updated_at]
    return left


@given(st.lists(records, unique_by=lambda r: r.key), queries)
def test_a_listing_holds_what_every_filter_allows_freshest_first(population, query):
    chosen = select(population, query)
    allowed = naive(population, query)
    wanted = min(query.limit, len(allowed)) if query.limit else len(allowed)
    assert len(chosen) == wanted
    assert all(record in allowed for record in chosen)
    left_out = [record for record in allowed if record not in chosen]
    ages = [record.updated_at for record in chosen]
    assert ages == sorted(ages, reverse=True)
    assert not left_out or not chosen or max(r.updated_at for r in left_out) <= ages[-1]


@given(st.lists(records, unique_by=lambda r: r.key), queries)
def test_the_memory_store_lists_by_the_same_rules(population, query):
    store = MemoryStore(stale_seconds=90, remove_seconds=600, clock=lambda: 0.0, wall=lambda: 0.003)
    stamped = [replace(record, updated_at=3) for record in population]
    for record in population:
        store.put(record)
    assert store.list(query) == select(stamped, query)


def test_a_silent_source_is_stale_then_forgotten_and_a_heartbeat_brings_it_back(store, clock):
    store.put(RECORD)
    store.beat(*RECORD.key, Heartbeat(READY))
    clock.now += 89.9
    assert store.get(*RECORD.key).status == READY
    clock.now += 0.1
    assert store.get(*RECORD.key).status == STALE
    assert [r.worker_id for r in store.list(Query(status=STALE))] == ["worker"]
    assert store.beat(*RECORD.key, Heartbeat(READY))
    assert store.get(*RECORD.key).status == READY
    clock.now += 600
    assert store.list(Query()) == []
    assert not store.beat(*RECORD.key, Heartbeat(READY))


def test_a_source_that_never_became_ready_is_reaped_as_well(store, clock):
    store.put(RECORD)
    clock.now += 90
    store.sweep()
    assert store.get(*RECORD.key).status == STALE
    clock.now += 510
    store.sweep()
    assert store.get(*RECORD.key) is None


def test_the_machines_date_has_no_part_in_reaping(clock):
    wall = [1_000_000.0]
    store = MemoryStore(stale_seconds=90, remove_seconds=600, clock=clock, wall=lambda: wall[0])
    store.put(replace(RECORD, status=READY))
    wall[0] += 3600
    assert store.get(*RECORD.key).status == READY
    wall[0] -= 7200
    clock.now += 90
    assert store.get(*RECORD.key).status == STALE


def test_becoming_stale_keeps_the_moment_the_source_was_last_heard_of(store, clock):
    before = store.put(replace(RECORD, status=READY)).updated_at
    clock.now += 90
    assert store.get(*RECORD.key).updated_at == before


def test_a_heartbeat_changes_status_load_and_reads_and_nothing_else(store):
    stored = store.put(replace(RECORD, topology={"host": "a"}, accelerator="cpu", training_step=4))
    assert store.beat(*RECORD.key, Heartbeat(READY, 0.0, 2))
    after = store.get(*RECORD.key)
    assert after == replace(stored, status=READY, source_load=0.0, reads_in_flight=2, updated_at=after.updated_at)
    assert store.beat(*RECORD.key, Heartbeat(READY))
    assert store.get(*RECORD.key).source_load is None


@pytest.mark.parametrize(("stale", "remove"), [(0, 10), (-1, 10), (10, 9), (float("nan"), 10)])
def test_a_store_that_could_never_be_right_is_refused(stale, remove):
    with pytest.raises(ConfigError, match="MX_STALE_SECONDS"):
        MemoryStore(stale_seconds=stale, remove_seconds=remove)
