"""Versions over the wire: both services of a directory on loopback, their client, and leases that are renewed."""

from __future__ import annotations

import logging
import threading
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from mx_common.directory import DirectoryServer, RefitClient, VersionStore
from mx_common.directory.versions import State
from mx_common.errors import DirectoryRefused, DirectoryUnavailable, SourceLost
from mx_common.wire import refit, refit_ext
from mx_common.wire.rpc import REFIT_SERVICE, VERSION_SERVICE, service_handler, unary_calls

CODE = grpc.StatusCode


@pytest.fixture
def versions(clock):
    return VersionStore(staging_seconds=600, clock=clock)


@pytest.fixture
def server(store, versions):
    with DirectoryServer("127.0.0.1:0", store, versions=versions) as running:
        yield running


@pytest.fixture
def client(server):
    with RefitClient(server.address, timeout=10) as connected:
        yield connected


@pytest.fixture
def raw(server):
    """The calls without our client, to send what it would not."""
    with grpc.insecure_channel(server.address) as channel:
        yield {**unary_calls(channel, REFIT_SERVICE), **unary_calls(channel, VERSION_SERVICE)}


def refusal(code, call, request):
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=10)
    assert caught.value.code() == code
    return caught.value.details()


def made(client, number, slots=("a",), **facts):
    return client.create_version("m", number, list(slots), **{"idempotency_key": f"run/{number}", **facts})


def published(client, number, slots=("a",), **facts):
    uid = made(client, number, slots, **facts)
    for slot in slots:
        client.add_shard(uid, slot, f"worker-{slot}", manifest_digest="d", manifest_endpoint="127.0.0.1:9000")
    return uid


def test_what_the_ranks_publish_is_what_a_receiver_finds(client):
    uid = made(client, 7, ("a", "b"), run="r")
    assert made(client, 7, ("b", "a"), run="r") == uid
    assert client.latest("m") is None
    facts = {"tensor_count": 3, "total_bytes": 1 << 40, "layout_signature": "L"}
    state = client.add_shard(uid, "a", "wa", manifest_digest="da", manifest_endpoint="10.0.0.1:9000", **facts)
    assert state == State.STAGING
    assert client.get(uid).missing == ("b",)
    assert client.add_shard(uid, "b", "wb", manifest_digest="db", manifest_endpoint="10.0.0.2:9000", **facts) == State.READY
    found = client.latest("m")
    assert (found.uid, found.number, found.run, found.slots, found.missing) == (uid, 7, "r", ("a", "b"), ())
    assert (found.state, found.open_leases, found.order, len(found.layout_signature)) == (State.READY, 0, 1, 32)
    assert (client.find("m"), client.find("m", 7), client.find("m", 6)) == (found, found, None)
    assert client.wait_ready(uid, 10) == client.get(uid) == found
    first, second = client.list_shards(uid)
    assert (first.source_slot_id, first.worker_id, first.manifest_digest, first.total_bytes) == ("a", "wa", "da", 1 << 40)
    assert (second.manifest_endpoint, second.tensor_count, second.layout_signature) == ("10.0.0.2:9000", 3, "L")


def test_versions_are_listed_newest_first(client):
    for number in (2, 4, 3):
        made(client, number)
    assert [found.number for found in client.versions("m")] == [4, 3, 2]
    assert client.versions("another") == []
    client.create_version("another", 0, ["a"], idempotency_key="another/0")
    assert [(found.model_name, found.number) for found in client.versions()] == [("m", 4), ("m", 3), ("m", 2), ("another", 0)]


def test_a_rank_that_never_publishes_is_named_by_whoever_waits(client):
    uid = made(client, 7, ("tp0", "tp1", "tp2"))
    client.add_shard(uid, "tp1", "w", manifest_digest="d", manifest_endpoint="h:1")
    said = r"\(number 7 of m\) is not READY: trainer rank slots 'tp0', 'tp2' never published within 0.1 s \(1 of 3 did\)"
    with pytest.raises(SourceLost, match=said):
        client.wait_ready(uid, 0.1)
    assert "slots 'tp0', 'tp2' never published within 5 s" in client.why_not_ready("m", 7, 5)
    assert "slots 'tp0', 'tp2' never published within 5 s" in client.why_not_ready("m", None, 5)


def test_whoever_finds_no_version_is_told_what_there_is(client):
    assert "no version of m was READY" in client.why_not_ready("m", None, 3)
    assert "it knows none at all" in client.why_not_ready("m", None, 3)
    published(client, 4)
    assert "version 9 of m was READY" in client.why_not_ready("m", 9, 3)
    assert "it knows 4 (READY)" in client.why_not_ready("m", 9, 3)


def test_a_wait_ends_when_the_last_rank_publishes(client):
    uid = made(client, 1)
    later = threading.Timer(0.2, published, (client, 1))
    later.start()
    assert client.wait_ready(uid, 30).state == State.READY
    later.join()


def test_a_version_that_became_ready_is_immutable(client):
    uid = published(client, 1)
    again = {"manifest_digest": "d", "manifest_endpoint": "127.0.0.1:9000"}
    assert client.add_shard(uid, "a", "worker-a", **again) == State.READY
    with pytest.raises(DirectoryRefused, match=r"FAILED_PRECONDITION.*is READY and takes no shard: slot 'a' of worker 'late'"):
        client.add_shard(uid, "a", "late", **again)
    with pytest.raises(DirectoryRefused, match=r"ALREADY_EXISTS.*with other contents"):
        client.create_version("m", 1, ["a", "b"], idempotency_key="run/1")


def test_a_reader_holds_a_version_that_is_superseded_until_it_leaves(client):
    uid = published(client, 1)
    with client.lease(uid, "reader") as lease:
        assert client.get(uid).open_leases == 1
        newer = published(client, 2)
        lease.check()
        assert client.get(uid).state == State.RELEASING
        assert client.latest("m").uid == newer
        with pytest.raises(SourceLost, match="superseded it; take the latest"), client.lease(uid, "another"):
            pytest.fail("a lease was granted")
        assert not client.wait_unleased(uid, 0.05)
    assert client.wait_unleased(uid, 0)
    with pytest.raises(SourceLost, match=rf"version {newer} \(number 2\) superseded it"):
        client.get(uid)


def test_a_lease_is_renewed_for_longer_than_it_lives(client, versions, clock, eventually):
    uid = published(client, 1)

    def ends():
        return max(lease.until for lease in versions._entry(uid).leases.values())

    with client.lease(uid, "reader", ttl=1) as lease:
        held = lease.lease_id
        for _ in range(3):
            clock.now += 0.9
            eventually(lambda: ends() == clock.now + 1, "the lease was renewed")
        lease.check()
        assert lease.lease_id == held
    assert client.get(uid).open_leases == 0


def test_a_reader_whose_lease_was_revoked_learns_it_before_it_installs(client):
    uid = published(client, 1)
    with client.lease(uid, "reader") as lease:
        assert client.delete(uid)
        lease.check()
        assert client.revoke(uid) == 1
        assert client.wait_unleased(uid, 0)
        said = rf"version {uid} was released while reader read it, .*it was deleted, and its publisher revoked its leases"
        with pytest.raises(SourceLost, match=said):
            lease.check()
    assert client.revoke(uid) == 0


def test_a_reader_that_was_stopped_past_its_lease_may_not_use_what_it_read(client, clock):
    uid = published(client, 1)
    with client.lease(uid, "reader") as lease:
        clock.now += 60
        with pytest.raises(SourceLost, match="has ended: stop reading"):
            lease.check()


def test_a_lease_outlives_a_directory_that_is_away_by_its_own_time_only(client, server, eventually):
    uid = published(client, 1)
    with client.lease(uid, "long", ttl=60) as long, client.lease(uid, "short", ttl=1) as short:
        server.stop(0)
        long.check()
        lost = eventually(lambda: loss(short), "the lease ran out")
        assert "was released while short read it, or may have been: its lease of 1 s does not hold" in lost
        assert loss(long) == ""


def loss(lease):
    """What `check` raises, if it does."""
    try:
        lease.check()
    except SourceLost as error:
        return str(error)
    return ""


def test_deleting_twice_and_waiting_for_what_is_gone_are_no_errors(client):
    uid = published(client, 1)
    assert client.delete(uid)
    assert not client.delete(uid)
    assert client.wait_unleased(uid, 0)
    with pytest.raises(SourceLost, match="is gone: it was deleted"):
        client.wait_ready(uid, 10)


def test_readers_on_their_own_threads_leave_no_thread_behind(client):
    uid = published(client, 1)

    def read(number):
        with client.lease(uid, f"reader-{number}") as lease:
            lease.check()

    with futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(40)))
    assert client.get(uid).open_leases == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "mx-version-lease"]


def test_malformed_requests_are_refused_with_what_would_be_right(raw):
    create = refit.CreateWeightVersionRequest
    bad = CODE.INVALID_ARGUMENT
    assert "name its slots" in refusal(bad, raw["CreateWeightVersion"], create(model_name="m"))
    twice = create(model_name="m", expected_source_slots=["a", "a"])
    assert "CreateWeightVersion: expected source slots ['a']" in refusal(bad, raw["CreateWeightVersion"], twice)
    begun = create(model_name="m", expected_source_slots=["a"], state=refit.WEIGHT_VERSION_STATE_READY)
    assert "only a version in object storage" in refusal(bad, raw["CreateWeightVersion"], begun)
    strange = create(model_name="m", expected_source_slots=["a"])
    strange.payload_format = 9
    assert "payload_format=9" in refusal(bad, raw["CreateWeightVersion"], strange)
    shard = refit.CreateWeightVersionShardRequest(shard=refit.WeightVersionShard(version_id="v", source_slot_id="a"))
    assert "worker_id of a shard has 0 bytes" in refusal(bad, raw["CreateWeightVersionShard"], shard)
    assert "worker_id is empty" in refusal(bad, raw["RegisterWorker"], refit.RegisterWorkerRequest())
    assert "model_name is empty" in refusal(bad, raw["LatestVersion"], refit_ext.LatestVersionRequest())
    state = refit.UpdateWeightVersionStateRequest(uid="v")
    assert "state=0 is not a state" in refusal(bad, raw["UpdateWeightVersionState"], state)


def test_what_is_gone_and_what_may_not_follow_have_codes_of_their_own(raw, client):
    uid = made(client, 1)
    ready = refit.UpdateWeightVersionStateRequest(uid=uid, state=refit.WEIGHT_VERSION_STATE_READY)
    assert "from STAGING to READY" in refusal(CODE.FAILED_PRECONDITION, raw["UpdateWeightVersionState"], ready)
    lease = refit.RegisterVersionLeaseRequest(version_id=uid, worker_id="w")
    assert "is STAGING" in refusal(CODE.FAILED_PRECONDITION, raw["RegisterVersionLease"], lease)
    assert "never was" in refusal(CODE.NOT_FOUND, raw["GetWeightVersion"], refit.GetWeightVersionRequest(uid="x"))
    renewal = refit_ext.RenewLeaseRequest(version_id=uid, lease_id="x", worker_id="w")
    assert "has ended" in refusal(CODE.NOT_FOUND, raw["RenewLease"], renewal)


def test_a_peer_that_knows_no_extension_makes_versions_and_leases_them(raw):
    request = refit.CreateWeightVersionRequest(model_name="m", idempotency_key="k", expected_source_slots=["a"])
    uid = raw["CreateWeightVersion"](request).version.uid
    shard = refit.WeightVersionShard(
        version_id=uid, source_slot_id="a", worker_id="w", manifest_digest="d", manifest_endpoint="h:1"
    )
    answer = raw["CreateWeightVersionShard"](refit.CreateWeightVersionShardRequest(shard=shard))
    assert (answer.version.state, answer.shard) == (refit.WEIGHT_VERSION_STATE_READY, shard)
    done = refit.UpdateWeightVersionStateRequest(uid=uid, state=refit.WEIGHT_VERSION_STATE_READY)
    assert raw["UpdateWeightVersionState"](done).version.state == refit.WEIGHT_VERSION_STATE_READY
    ask = refit.RegisterVersionLeaseRequest(version_id=uid, worker_id="w", ttl_seconds=30)
    lease = raw["RegisterVersionLease"](ask).lease
    # it renews by asking again
    assert raw["RegisterVersionLease"](ask).lease.lease_id == lease.lease_id
    end = refit.DeleteVersionLeaseRequest(version_id=uid, lease_id=lease.lease_id, worker_id="w")
    assert [raw["DeleteVersionLease"](end).deleted for _ in range(2)] == [True, False]
    worker = refit.WorkerRegistration(worker_id="w", role=refit.WORKER_ROLE_TRAINER, model_name="m")
    assert raw["RegisterWorker"](refit.RegisterWorkerRequest(worker=worker, ttl_seconds=30)).worker.expires_at_unix_ms > 0


class PlainServer:
    """RefitService as a server without our extensions would answer for one version; every lease it grants is another one."""

    def __init__(self):
        self.leases = []

    def GetWeightVersion(self, request, context):
        version = refit.WeightVersion(uid=request.uid, model_name="m", expected_source_slots=["a", "b"], state=1)
        return refit.GetWeightVersionResponse(version=version)

    def ListWeightVersionShards(self, request, context):
        return refit.ListWeightVersionShardsResponse(shards=[refit.WeightVersionShard(source_slot_id="b")])

    def RegisterVersionLease(self, request, context):
        self.leases.append(f"lease-{len(self.leases)}")
        return refit.RegisterVersionLeaseResponse(lease=refit.VersionLease(lease_id=self.leases[-1]))

    def DeleteVersionLease(self, request, context):
        self.leases.remove(request.lease_id)
        self.leases.append("")
        return refit.DeleteVersionLeaseResponse(deleted=True)


@pytest.fixture
def plain():
    implementation = PlainServer()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((service_handler(REFIT_SERVICE, implementation),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with RefitClient(f"127.0.0.1:{port}", timeout=10) as client:
        yield client, implementation
    server.stop(0).wait(10)


def test_a_plain_server_is_used_for_what_it_has_and_named_for_what_it_lacks(plain):
    client, _ = plain
    found = client.get("v")
    assert (found.number, found.missing, found.open_leases) == (-1, ("a",), None)
    with pytest.raises(SourceLost, match="slot 'a' never published"):
        client.wait_ready("v", 0)
    assert not client.wait_unleased("v", 0)
    for call in (lambda: client.latest("m"), lambda: client.find("m", 3), lambda: client.revoke("v")):
        with pytest.raises(DirectoryRefused, match=r"mx.refit.VersionService, which the server at .* does not have: a plain"):
            call()


def test_a_lease_of_a_plain_server_is_renewed_by_another_one(plain):
    client, server = plain
    with client.lease("v", "reader") as lease:
        lease.check()
        assert lease.lease_id != "lease-0"
        assert [held for held in server.leases if held] == [lease.lease_id]
    assert not any(server.leases)


def test_nobody_there_is_said_as_such():
    with RefitClient("127.0.0.1:1", timeout=0.3) as client, pytest.raises(DirectoryUnavailable, match="LatestVersion to the"):
        client.latest("m")


def test_health_and_reflection_know_every_service(server):
    names = {"model_express.refit.RefitService", "mx.refit.VersionService", "mx.activity.ActivityService"}
    with grpc.insecure_channel(server.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for name in names:
            answer = check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        database = ProtoReflectionDescriptorDatabase(channel)
        assert names <= set(database.get_services())
        for package, service in (("mx.refit", "VersionService"), ("mx.activity", "ActivityService")):
            assert database.FindFileContainingSymbol(f"{package}.{service}").package == package


def test_a_server_beside_others_says_once_that_versions_are_its_own(store, caplog):
    store.blocking = True
    with (
        DirectoryServer("127.0.0.1:0", store) as server,
        RefitClient(server.address) as client,
        caplog.at_level(logging.WARNING),
    ):
        assert "server's memory" not in caplog.text
        made(client, 1)
        made(client, 2)
    assert caplog.text.count("versions of trained weights lie in this server's memory") == 1


def test_the_time_that_a_version_may_stage_comes_from_the_environment(monkeypatch, eventually):
    monkeypatch.setenv("MX_VERSION_STAGING_SECONDS", "0.2")
    with DirectoryServer("127.0.0.1:0") as server, RefitClient(server.address) as client:
        uid = made(client, 1)
        eventually(lambda: not client.versions("m"), "the version was dropped")
        with pytest.raises(SourceLost, match=r"it was STAGING for .* s, and 'a' published no shard"):
            client.get(uid)
