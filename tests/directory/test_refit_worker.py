"""Manifests of shards over the wire: served by whoever holds them, and refused when they are not what the record promised."""

from __future__ import annotations

import hashlib

import pytest

from mx_common.directory import ManifestServer, fetch_manifest
from mx_common.directory.refit_worker import MAX_MANIFEST_BYTES, manifest_digest
from mx_common.errors import ConfigError, DirectoryUnavailable, ManifestMismatch, SourceLost


@pytest.fixture
def asked():
    return []


@pytest.fixture
def server(asked):
    with ManifestServer(asked=lambda: asked.append(1)) as running:
        yield running


def test_a_manifest_arrives_as_it_was_added_and_every_request_is_told(server, asked):
    table = bytes(range(256)) * (1 << 15)
    digest = server.add("v", "a", table)
    assert digest == manifest_digest(table)
    assert [fetch_manifest(server.endpoint, "v", "a", digest) == table for _ in range(2)] == [True, True]
    assert len(asked) == 2


def test_a_manifest_of_many_tensors_passes(server):
    table = bytes(64 << 20)
    assert fetch_manifest(server.endpoint, "v", "a", server.add("v", "a", table), timeout=60) == table


def test_a_manifest_that_no_message_takes_is_refused_when_it_is_added(server):
    with pytest.raises(ConfigError, match="publish fewer tensors a slot"):
        server.add("v", "a", bytes(MAX_MANIFEST_BYTES + 1))


def test_what_is_not_held_any_more_is_lost_and_what_is_held_is_said(server, asked):
    digest = server.add("v1", "a", b"table")
    server.add("v2", "a", b"table")
    assert server.remove("v1", "a")
    assert not server.remove("v1", "a")
    with pytest.raises(SourceLost, match=r"slot 'a' of version 'v1' is not held here \(any more\); held are 'a of v2'"):
        fetch_manifest(server.endpoint, "v1", "a", digest)
    with pytest.raises(SourceLost, match="slot 'b' of version 'v2'"):
        fetch_manifest(server.endpoint, "v2", "b", digest)
    assert len(asked) == 2


@pytest.mark.parametrize("expected", ["0" * 32, "0" * 64, "of some other kind"])
def test_a_manifest_of_another_publication_is_no_manifest(server, expected):
    server.add("v", "a", b"table")
    with pytest.raises(ManifestMismatch, match=f"slot a of version v at .* record of the shard says {expected}"):
        fetch_manifest(server.endpoint, "v", "a", expected)


@pytest.mark.parametrize("expected", ["0" * 32, "0" * 64])
def test_a_holder_that_states_a_digest_its_bytes_do_not_have_is_found_out(server, expected):
    server.add("v", "a", b"table", digest=expected)
    with pytest.raises(ManifestMismatch, match="of another publication"):
        fetch_manifest(server.endpoint, "v", "a", expected)


@pytest.mark.parametrize("digest", [hashlib.sha256(b"table").hexdigest(), "of some other kind"])
def test_digests_of_other_publishers_are_taken(server, digest):
    server.add("v", "a", b"table", digest=digest)
    assert fetch_manifest(server.endpoint, "v", "a", digest) == b"table"


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "", "nowhere"])
def test_a_holder_that_is_not_there_is_lost(endpoint):
    with pytest.raises(SourceLost, match="the manifest of slot a of version v"):
        fetch_manifest(endpoint, "v", "a", "d", timeout=2)


def test_a_hook_that_fails_costs_no_reader_its_answer(caplog):
    with ManifestServer(asked=lambda: 1 // 0) as server:
        digest = server.add("v", "a", b"table")
        assert fetch_manifest(server.endpoint, "v", "a", digest) == b"table"
    assert "ZeroDivisionError" in caplog.text


def test_a_port_belongs_to_one_server_and_is_free_after_it(server):
    host, _, port = server.endpoint.rpartition(":")
    with pytest.raises(DirectoryUnavailable, match="the manifest service of trained weights cannot bind"):
        ManifestServer(host, int(port)).start()
    server.stop()
    with pytest.raises(DirectoryUnavailable, match="call start"):
        _ = server.endpoint
    with ManifestServer(host, int(port)) as second:
        assert second.endpoint == f"{host}:{port}"
