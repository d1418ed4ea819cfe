"""A directory counts its answers by what the caller was told, and shows what it knows while it serves."""

from __future__ import annotations

import pytest
from test_directory_redis import make_store, redis_server  # noqa: F401  fixtures

from mx_common import metrics
from mx_common.directory import DirectoryClient, DirectoryServer
from mx_common.directory._counted import Known
from mx_common.directory.refit_client import RefitClient
from mx_common.directory.versions import VersionStore
from mx_common.errors import DirectoryError, DirectoryUnavailable
from mx_common.identity import Identity
from mx_common.wire import p2p


@pytest.fixture(autouse=True)
def nothing_is_counted_yet():
    metrics.TABLE.clear()


@pytest.fixture
def server(nothing_is_counted_yet, store):
    with DirectoryServer("127.0.0.1:0", store) as running:
        yield running


def counted():
    """{(method, code): calls}"""
    return {key: int(value) for key, value in metrics.DIRECTORY_REQUESTS.snapshot().items()}


def test_answers_are_counted_by_method_and_by_what_the_caller_was_told(
    client, server, identity, store, monkeypatch, eventually
):
    client.list_sources()
    client.publish(identity, p2p.WorkerMetadata(worker_rank=0), "w")
    with pytest.raises(DirectoryError):
        client.publish(identity, p2p.WorkerMetadata(), "")
    with RefitClient(server.address) as refits:
        with pytest.raises(DirectoryError):
            refits.create_version("m", 1, ["a", "a"], idempotency_key="k")
        refits.versions("m")

    def away(query):
        raise DirectoryUnavailable("the store is away")

    monkeypatch.setattr(store, "list", away)
    with DirectoryClient(server.address, retry=False) as once, pytest.raises(DirectoryUnavailable):
        once.list_sources()
    wanted = {
        ("ListSources", "OK"): 1,
        ("PublishMetadata", "OK"): 1,
        ("PublishMetadata", "INVALID_ARGUMENT"): 1,
        ("CreateWeightVersion", "INVALID_ARGUMENT"): 1,
        ("ListVersions", "OK"): 1,
        ("ListSources", "UNAVAILABLE"): 1,
    }
    # a refusal has reached its caller a moment before it is counted
    eventually(lambda: counted() == wanted, f"the calls are counted: {wanted}")
    assert metrics.DIRECTORY_SOURCES.asked() == {}  # no reading, and no error either


def test_what_a_directory_knows_is_shown_until_it_stops(server, client):
    starting = p2p.WorkerMetadata(status=p2p.SOURCE_STATUS_INITIALIZING)
    for number in range(3):
        client.publish(Identity(model_name=f"m{number}"), starting, "w")
    (listed,) = client.list_sources(identity=Identity(model_name="m0")).instances
    client.update_status(listed.mx_source_id, "w", 0, p2p.SOURCE_STATUS_READY, None)
    with RefitClient(server.address) as refits:
        refits.create_version("m", 1, ["rank0"], idempotency_key="k")
    sources = {key[0]: value for key, value in metrics.DIRECTORY_SOURCES.asked().items()}
    assert sources == {"UNKNOWN": 0, "INITIALIZING": 2, "READY": 1, "STALE": 0}
    versions = {key[0]: value for key, value in metrics.DIRECTORY_VERSIONS.asked().items()}
    assert versions == {"STAGING": 1, "READY": 0, "RELEASING": 0}
    server.stop()
    assert metrics.DIRECTORY_SOURCES.asked() == metrics.DIRECTORY_VERSIONS.asked() == {}


def test_a_store_that_may_keep_one_waiting_is_counted_by_sweeps_and_never_by_a_scrape(make_store, monkeypatch):  # noqa: F811
    store = make_store()
    known = Known(store, VersionStore(staging_seconds=60, lease_seconds=60))
    known.show()
    known.sweep()
    assert metrics.DIRECTORY_SOURCES.asked() == {}, "nobody wants to see it"
    monkeypatch.setenv("MX_METRICS_PORT", "9400")
    known.sweep()

    def away(query):
        raise DirectoryUnavailable("the store is away")

    monkeypatch.setattr(store, "list", away)
    assert set(metrics.DIRECTORY_SOURCES.asked().values()) == {0.0}
    with pytest.raises(DirectoryUnavailable):
        known.sweep()
    assert metrics.DIRECTORY_SOURCES.asked() == {}, "what was known once is no reading"
    known.hide()
