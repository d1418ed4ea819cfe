"""A worker's control service and its readers: manifests, leases held over the wire, and ports that changed hands."""

from __future__ import annotations

import os
import signal
from concurrent import futures

import grpc
import pytest

from mx_common.directory import LeaseKeeper, Leases, WorkerClient, WorkerServer
from mx_common.directory.worker_service import advertised_host, worker_port
from mx_common.errors import ConfigError, DirectoryUnavailable, SourceLost
from mx_common.wire import p2p
from mx_common.wire.rpc import WORKER_SERVICE, service_handler, unary_calls

SOURCE = "0123456789abcdef"


def manifest():
    return p2p.GetTensorManifestResponse(tensors=[p2p.TensorDescriptor(name="w", addr=64, size=8, digest=5)], processed=True)


@pytest.fixture
def leases():
    return Leases(60)


@pytest.fixture
def worker(leases):
    with WorkerServer(manifest, leases, "w", mx_source_id=SOURCE) as running:
        yield running


@pytest.fixture
def reader(worker):
    with WorkerClient(worker.endpoint, SOURCE, "w", timeout=10) as connected:
        yield connected


def test_a_reader_gets_the_manifest_with_the_ids_stamped(reader):
    got = reader.get_manifest()
    assert [(t.name, t.digest) for t in got.tensors] == [("w", 5)]
    assert (got.mx_source_id, got.worker_id, got.processed) == (SOURCE, "w", True)


def test_a_keeper_holds_a_lease_and_always_releases_it(reader, leases):
    def failing_read():
        with LeaseKeeper(reader) as lease:
            assert leases.open_count() == 1
            assert lease.manifest.tensors[0].name == "w"
            lease.check()
            raise RuntimeError("reader failed")

    with pytest.raises(RuntimeError, match="reader failed"):
        failing_read()
    assert leases.open_count() == 0


def test_a_keeper_renews_for_longer_than_a_lease_lives():
    leases = Leases(1)
    with (
        WorkerServer(manifest, leases, "w", mx_source_id=SOURCE) as worker,
        WorkerClient(worker.endpoint, SOURCE) as reader,
        LeaseKeeper(reader) as lease,
    ):
        held = lease.lease_id
        assert not leases.wait_idle(2.5)
        lease.check()
        assert lease.lease_id == held


def test_a_reader_that_dies_holds_the_memory_for_one_lease_time_only(clock):
    short = Leases(60, clock)
    with WorkerServer(manifest, short, "w", mx_source_id=SOURCE) as server, WorkerClient(server.endpoint, SOURCE) as reader:
        reader.prepare_read()
    assert not short.wait_idle(0)
    clock.now += 60
    assert short.wait_idle(0)


def test_a_reader_that_cannot_renew_gets_a_lease_for_a_whole_transfer(monkeypatch, clock):
    monkeypatch.setenv("MX_TRANSFER_TIMEOUT", "300")
    patient = Leases(60, clock)
    with (
        WorkerServer(manifest, patient, "w", mx_source_id=SOURCE) as server,
        grpc.insecure_channel(server.endpoint) as channel,
    ):
        unary_calls(channel, WORKER_SERVICE)["PrepareTensorRead"](p2p.PrepareTensorReadRequest(mx_source_id=SOURCE), timeout=10)
    clock.now += 599
    assert patient.open_count() == 1
    clock.now += 1
    assert patient.open_count() == 0


def test_a_keeper_whose_lease_was_ended_by_the_source_says_stop(eventually):
    leases = Leases(1)
    with (
        WorkerServer(manifest, leases, "w", mx_source_id=SOURCE) as worker,
        WorkerClient(worker.endpoint, SOURCE) as reader,
        LeaseKeeper(reader) as lease,
    ):
        leases.release(lease.lease_id)

        def lost():
            try:
                lease.check()
            except SourceLost as error:
                return str(error)
            return ""

        assert f"the read lease at {worker.endpoint} was not renewed" in eventually(lost, "the keeper learned it")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_dies_or_stops_under_a_lease_is_noticed(spawn, eventually, number):
    source = spawn("worker", 0, SOURCE, "w", 1)
    endpoint = source.expect("endpoint")
    with WorkerClient(endpoint, SOURCE, "w", timeout=2) as reader, LeaseKeeper(reader) as lease:
        lease.check()
        os.kill(source.popen.pid, number)

        def lost():
            try:
                lease.check()
            except SourceLost as error:
                return endpoint in str(error)
            return False

        eventually(lost, "the lease ran out")


def test_a_port_that_another_process_took_over_is_a_lost_source(spawn):
    first = spawn("worker", 0, SOURCE, "first")
    endpoint = first.expect("endpoint")
    with WorkerClient(endpoint, SOURCE, "first", timeout=10) as reader:
        reader.get_manifest()
        first.kill()
        with pytest.raises(SourceLost, match=f"at {endpoint} for source {SOURCE} worker first failed .*UNAVAILABLE"):
            reader.get_manifest()
    spawn("worker", endpoint.rpartition(":")[2], SOURCE, "second").expect("endpoint")
    with WorkerClient(endpoint, SOURCE, "first", timeout=10) as reader:
        for call in (reader.get_manifest, reader.prepare_read):
            with pytest.raises(SourceLost, match="NOT_FOUND: worker second answers here, not 'first'"):
                call()
    with WorkerClient(endpoint, "another-source", timeout=10) as reader, pytest.raises(SourceLost, match=f"source {SOURCE}"):
        reader.get_manifest()


@pytest.mark.parametrize("kind", ["http", "silent", "grpc"])
def test_a_port_that_something_else_took_over_is_a_lost_source(spawn, free_port, kind):
    spawn("foreign", kind, free_port).expect("listening")
    with WorkerClient(f"127.0.0.1:{free_port}", SOURCE, timeout=1) as reader:
        for call in (reader.get_manifest, reader.prepare_read):
            with pytest.raises(SourceLost, match=f"at 127.0.0.1:{free_port}"):
                call()


class OlderPeer:
    """A source from before leases, which does not check whom it was asked for either."""

    def GetTensorManifest(self, request, context):
        return p2p.GetTensorManifestResponse(tensors=[p2p.TensorDescriptor(name="w")], mx_source_id=SOURCE)


@pytest.fixture
def older_endpoint():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((service_handler(WORKER_SERVICE, OlderPeer()),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait(5)


def test_a_peer_without_leases_is_read_by_its_manifest(older_endpoint):
    with WorkerClient(older_endpoint, SOURCE, "w", timeout=10) as reader, LeaseKeeper(reader) as lease:
        assert lease.lease_id == ""
        assert lease.manifest.tensors[0].name == "w"
        lease.check()


def test_an_older_peer_that_answers_for_another_source_is_a_lost_source(older_endpoint):
    with (
        WorkerClient(older_endpoint, "other", timeout=10) as reader,
        pytest.raises(SourceLost, match=f"source {SOURCE} answers"),
    ):
        reader.get_manifest()


def test_a_worker_that_has_no_id_yet_asks_for_patience(leases):
    with WorkerServer(manifest, leases, "w") as worker, WorkerClient(worker.endpoint, SOURCE, timeout=10) as reader:
        with pytest.raises(SourceLost, match="not registered yet"):
            reader.get_manifest()
        worker.mx_source_id = SOURCE
        assert reader.get_manifest().mx_source_id == SOURCE


def test_a_worker_about_to_release_its_memory_admits_no_reader(reader, leases):
    leases.close()
    with pytest.raises(SourceLost, match="about to release its memory"):
        reader.prepare_read()
    assert leases.open_count() == 0


def test_a_manifest_that_cannot_be_built_leaves_no_lease_behind(leases):
    def broken():
        raise RuntimeError("tensor gone")

    with WorkerServer(broken, leases, "w", mx_source_id=SOURCE) as worker, WorkerClient(worker.endpoint, SOURCE) as reader:
        with pytest.raises(SourceLost, match="tensor gone"):
            reader.prepare_read()
        assert leases.open_count() == 0


def test_artifact_calls_are_not_served(worker):
    with grpc.insecure_channel(worker.endpoint) as channel, pytest.raises(grpc.RpcError) as caught:
        unary_calls(channel, WORKER_SERVICE)["PrepareArtifactChunk"](p2p.PrepareArtifactChunkRequest(), timeout=10)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_an_unnamed_source_is_refused(worker):
    with WorkerClient(worker.endpoint, "", timeout=10) as reader, pytest.raises(SourceLost, match="mx_source_id is empty"):
        reader.get_manifest()


def test_a_worker_port_that_is_taken_is_named_with_its_setting(worker, leases):
    port = int(worker.endpoint.rpartition(":")[2])
    with pytest.raises(DirectoryUnavailable, match=f"worker v cannot bind 127.0.0.1:{port}.*MX_WORKER_PORT"):
        WorkerServer(manifest, leases, "v", port=port).start()


def test_ports_and_hosts_come_from_the_environment(monkeypatch):
    assert worker_port(3) == 0
    monkeypatch.setenv("MX_WORKER_PORT", "9000")
    assert worker_port(3) == 9003
    assert advertised_host("127.0.0.1:8001") == "127.0.0.1"
    monkeypatch.setenv("MX_ADVERTISE_HOST", "node-7")
    assert advertised_host("127.0.0.1:8001") == "node-7"


@pytest.mark.parametrize("port", [70000, -1])
def test_a_port_beyond_the_range_is_refused(leases, port):
    with pytest.raises(ConfigError, match="control service"):
        WorkerServer(manifest, leases, "w", port=port)
