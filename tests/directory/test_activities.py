"""Loads and refits that are under way: what a directory keeps of them, for how long, and how many."""

from __future__ import annotations

from dataclasses import replace

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from test_directory_redis import make_store, redis_server  # noqa: F401  fixtures

from mx_common.directory import Activity, ActivityClient, DirectoryServer
from mx_common.directory import activities as limits
from mx_common.directory import redis_activities as redis_limits
from mx_common.directory.activities import LIVES, MAX_BYTES, MAX_GBPS, MemoryActivities, pause_for
from mx_common.directory.store import MemoryStore
from mx_common.errors import ConfigError, DirectoryRefused, DirectoryUnavailable
from mx_common.wire import activity as wire

ONE = Activity("a1", "worker-1", "org/model", "load", "node-1", 0, 1, "vllm", sources=("source-1",), stage="wire")
OTHER = replace(ONE, activity_id="a2", path="reshard", version=0, version_id="v0", sources=("rank0", "rank1"))

LOAD, REFIT = ONE.to_proto(), OTHER.to_proto()


def load(**change):
    return replace(ONE, **change).to_proto()


@pytest.fixture(params=["memory", "redis"])
def activities(request, clock, monkeypatch):
    if request.param == "memory":
        return MemoryActivities(clock=clock)
    monkeypatch.setattr(redis_limits, "LIVES", 1000)  # Redis has a clock of its own
    return request.getfixturevalue("make_store")().activities


def test_what_is_reported_is_told_until_it_ends(activities):
    assert activities.all() == []
    for activity in (LOAD, REFIT):
        activities.report(activity)
    activities.report(load(bytes_done=5, bytes_total=9))
    assert sorted(activities.all(), key=lambda one: one.activity_id) == [load(bytes_done=5, bytes_total=9), REFIT]
    activities.end("a1")
    activities.end("never there")
    assert activities.all() == [REFIT]


def test_what_is_silent_is_forgotten(clock):
    activities = MemoryActivities(clock=clock)
    pause = activities.report(LOAD)
    clock.now += LIVES * pause - 0.1
    activities.report(REFIT)
    assert activities.all() == [LOAD, REFIT]
    clock.now += 0.2
    assert activities.all() == [REFIT]


def test_what_ended_without_a_word_does_not_slow_down_those_that_come_later(clock, monkeypatch):
    monkeypatch.setattr(limits, "REPORTS_PER_SECOND", 2)
    activities = MemoryActivities(clock=clock)
    for number in range(9):
        activities.report(load(activity_id=f"killed-{number}"))
    clock.now += 60
    assert activities.report(LOAD) == 1.0, "nobody has looked since"


def test_what_was_told_a_longer_pause_does_not_keep_others_in_view(clock, monkeypatch):
    monkeypatch.setattr(limits, "REPORTS_PER_SECOND", 1)
    activities = MemoryActivities(clock=clock)
    for number in range(9):
        longest = activities.report(load(activity_id=f"a{number}"))
    for number in range(8):
        activities.end(f"a{number}")
    activities.report(LOAD)
    clock.now += LIVES * longest - 1
    assert [one.activity_id for one in activities.all()] == ["a8"]


def test_what_is_silent_is_forgotten_by_redis_itself(make_store, redis_server):  # noqa: F811
    pause = make_store().activities.report(LOAD)
    with redis.Redis(port=redis_server.port) as client:
        (key,) = client.keys("mx:activity:*")
        assert 0 < client.pttl(key) <= 1000 * LIVES * pause
        client.delete(key)  # as its time does
    assert make_store().activities.all() == []


def test_servers_that_share_a_redis_tell_the_same(make_store):  # noqa: F811
    one, other = make_store().activities, make_store().activities
    one.report(LOAD)
    assert other.all() == [LOAD]


@pytest.mark.parametrize(("count", "pause"), [(0, 1.0), (1, 1.0), (500, 1.0), (1000, 2.0), (16384, 32.768)])
def test_of_many_each_reports_less_often(count, pause):
    assert pause_for(count) == pause


def test_the_pause_that_is_told_follows_the_number_of_activities(activities, monkeypatch):
    for module in (limits, redis_limits):
        monkeypatch.setattr(module, "REPORTS_PER_SECOND", 2)
    pauses = [activities.report(load(activity_id=f"a{n}")) for n in range(7)]
    assert pauses == [1.0, 1.0, 1.0, 1.5, 2.0, 2.5, 3.0]


def test_more_than_there_is_room_for_is_not_kept_and_harms_nothing(activities, monkeypatch):
    for module in (limits, redis_limits):
        monkeypatch.setattr(module, "MAX_ACTIVITIES", 2)
    for name in ("a1", "a2", "a3"):
        activities.report(load(activity_id=name))
    activities.report(load(activity_id="a1", stage="verify"))
    assert sorted((one.activity_id, one.stage) for one in activities.all()) == [("a1", "verify"), ("a2", "wire")]
    activities.end("a2")
    activities.report(load(activity_id="a3"))
    assert sorted(one.activity_id for one in activities.all()) == ["a1", "a3"]


def test_what_is_silent_makes_room(clock, monkeypatch):
    monkeypatch.setattr(limits, "MAX_ACTIVITIES", 1)
    activities = MemoryActivities(clock=clock)
    activities.report(LOAD)
    clock.now += 60
    activities.report(REFIT)
    assert activities.all() == [REFIT]


texts = st.text(min_size=1, max_size=20)
counts = st.integers(0, (1 << 64) - 1)
numbers = st.floats(0, 1e9, allow_nan=False)


@settings(max_examples=30, deadline=None)
@given(
    st.builds(
        Activity,
        activity_id=texts,
        worker_id=texts,
        model_name=texts,
        path=texts,
        host=st.text(max_size=20),
        rank=st.integers(0, 1 << 31),
        version=st.none() | counts,
        sources=st.lists(texts, max_size=16).map(tuple),
        bytes_done=st.integers(0, MAX_BYTES),
        bytes_total=st.integers(0, MAX_BYTES),
        gbps=st.floats(0, MAX_GBPS),
        seconds=numbers,
    )
)
def test_an_activity_crosses_the_wire_unchanged(activity):
    assert Activity.from_proto(type(activity.to_proto()).FromString(activity.to_proto().SerializeToString())) == activity


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"worker_id": ""}, "worker_id of an activity is empty"),
        ({"model_name": ""}, "model_name of an activity is empty"),
        ({"path": ""}, "path of an activity is empty"),
        ({"activity_id": ""}, "activity_id of an activity is empty"),
        ({"gbps": float("nan")}, "gbps of an activity is nan"),
        ({"seconds": -1.0}, "seconds of an activity is -1.0"),
        ({"gbps": 1e300}, r"gbps of an activity is 1e\+300; it has to be between 0 and 1e\+06"),
        ({"bytes_done": 1 << 63}, "bytes_done of an activity"),
        ({"bytes_total": MAX_BYTES + 1}, "bytes_total of an activity"),
        ({"bytes_done": -1}, "bytes_done of an activity is -1"),
        ({"sources": ("s",) * 17}, "names 17 sources"),
    ],
)
def test_an_activity_that_means_nothing_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        replace(ONE, **change)


def test_a_server_tells_what_was_reported_to_it_by_model(server):
    other = replace(OTHER, model_name="org/other")
    with ActivityClient(server.address, timeout=10) as client:
        assert client.activities() == []
        assert client.report(ONE) == client.report(other) == 1.0
        assert sorted(one.activity_id for one in client.activities()) == ["a1", "a2"]
        assert client.activities("org/other") == [other]
        client.end(ONE)
        assert client.activities() == [other]


@pytest.mark.parametrize("wrong", [{"gbps": 1e300}, {"bytes_done": (1 << 64) - 1}, {"bytes_total": 1 << 63}])
def test_a_figure_that_no_machine_has_is_neither_taken_by_a_server_nor_shown_by_a_client_of_an_older_one(wrong):
    message = ONE.to_proto()
    for name, value in wrong.items():
        setattr(message, name, value)
    store = MemoryStore(stale_seconds=30, remove_seconds=60)
    with DirectoryServer("127.0.0.1:0", store) as server, ActivityClient(server.address, timeout=10) as client:
        with pytest.raises(DirectoryRefused, match=next(iter(wrong))):
            client._call("ReportActivity", wire.ReportActivityRequest(activity=message))
        store.activities.report(message)
        client.report(OTHER)
        assert client.activities() == [OTHER]


def test_an_activity_that_nobody_could_keep_is_refused_and_said_why(server):
    with ActivityClient(server.address, timeout=10) as client:
        with pytest.raises(DirectoryRefused, match=r"ReportActivity: an activity of .* bytes is too large"):
            client.report(replace(ONE, host="h" * 5000))
        assert client.activities() == []


def test_a_redis_that_is_away_is_said_as_such(make_store, redis_server):  # noqa: F811
    with DirectoryServer("127.0.0.1:0", make_store()) as server, ActivityClient(server.address, timeout=10) as client:
        client.report(ONE)
        redis_server.stop()
        try:
            with pytest.raises(DirectoryUnavailable, match="Redis"):
                client.activities()
        finally:
            redis_server.start()
