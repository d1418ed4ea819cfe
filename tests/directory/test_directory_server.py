"""The four calls, health and reflection of a directory server on loopback."""

from __future__ import annotations

import threading

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from mx_common.directory import DirectoryClient, DirectoryServer
from mx_common.errors import DirectoryRefused, DirectoryUnavailable
from mx_common.identity import Identity, mx_source_id
from mx_common.wire import p2p
from mx_common.wire.rpc import P2P_SERVICE, unary_calls

READY, STALE = p2p.SOURCE_STATUS_READY, p2p.SOURCE_STATUS_STALE


@pytest.fixture
def raw(server):
    """The server's calls without our client, to send what it would not."""
    with grpc.insecure_channel(server.address) as channel:
        yield unary_calls(channel, P2P_SERVICE)


def refusal(call, request):
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=10)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.details()


def test_what_a_source_publishes_is_what_a_target_gets(client, identity):
    worker = p2p.WorkerMetadata(worker_rank=3, accelerator="cpu", nixl_metadata=b"\0agent", topology={"host": "a"})
    source_id = client.publish(identity, worker, "w")
    assert source_id == mx_source_id(identity)
    found = client.get_metadata(source_id, "w")
    assert (found.worker.worker_rank, found.worker.nixl_metadata, found.identity.model_name) == (3, b"\0agent", "Org/Model")
    (listed,) = client.list_sources(identity).instances
    assert (listed.worker_rank, listed.accelerator, dict(listed.topology)) == (3, "cpu", {"host": "a"})
    assert client.get_metadata(source_id, "another") is None


def test_every_filter_of_the_protocol_is_honoured(client, clock):
    for step, rank in ((1, 0), (2, 1), (3, 0)):
        one = Identity(model_name="m", extra_parameters={"training_step": str(step), "layout_signature": "L"})
        client.update_status(client.publish(one, p2p.WorkerMetadata(worker_rank=rank), f"w{step}"), f"w{step}", rank, READY)
    client.publish(Identity(model_name="other"), p2p.WorkerMetadata(), "o")

    def names(*arguments, **filters):
        return sorted(i.worker_id for i in client.list_sources(*arguments, **filters).instances)

    assert names() == ["o", "w1", "w2", "w3"]
    assert names(Identity(model_name="other")) == ["o"]
    assert names(status=READY) == ["w1", "w2", "w3"]
    assert names(status=p2p.SOURCE_STATUS_UNKNOWN) == ["o"]
    assert names(model_name="m") == ["w1", "w2", "w3"]
    assert names(worker_rank=0) == ["o", "w1", "w3"]
    assert names(min_training_step=2) == ["w2", "w3"]
    assert len(names(limit=2)) == 2
    assert names(limit=0) == names()
    now = client.list_sources().server_time_ms
    assert names(min_updated_at=now + 1) == []
    assert names(status=READY, worker_rank=0, min_training_step=2) == ["w3"]
    steps = {i.worker_id: i.training_step for i in client.list_sources(model_name="m").instances}
    assert steps == {"w1": 1, "w2": 2, "w3": 3}


def test_a_measured_zero_load_differs_from_no_reading(client, identity):
    source_id = client.publish(identity, p2p.WorkerMetadata(), "w")

    def load():
        (listed,) = client.list_sources().instances
        return listed.source_load if listed.HasField("source_load") else None

    assert load() is None
    assert client.update_status(source_id, "w", 0, READY, 0.0)
    assert load() == 0.0
    assert client.update_status(source_id, "w", 0, READY)
    assert load() is None


@pytest.mark.parametrize("load", [float("nan"), float("inf"), float("-inf")])
def test_a_load_that_is_no_number_is_no_reading_and_costs_no_heartbeat(client, identity, load):
    source_id = client.publish(identity, p2p.WorkerMetadata(), "w")
    assert client.update_status(source_id, "w", 0, READY, load)
    (listed,) = client.list_sources(status=READY).instances
    assert not listed.HasField("source_load")


def test_a_heartbeat_never_rewrites_the_record(client, identity):
    source_id = client.publish(identity, p2p.WorkerMetadata(worker_rank=2, agent_name="a"), "w")
    assert client.update_status(source_id, "w", 7, READY, 0.5, reads_in_flight=1)
    found = client.get_metadata(source_id, "w")
    assert (found.worker.worker_rank, found.worker.agent_name, found.worker.status) == (2, "a", READY)
    (listed,) = client.list_sources().instances
    assert (listed.worker_rank, listed.reads_in_flight, listed.status) == (2, 1, READY)


def test_the_heartbeat_of_an_unknown_worker_asks_it_to_register_again(client, identity, raw):
    assert client.update_status(mx_source_id(identity), "w", 0, READY) is False
    answer = raw["UpdateStatus"](p2p.UpdateStatusRequest(mx_source_id="x", worker_id="w"))
    assert "publish it again" in answer.message


@pytest.mark.parametrize("skew_ms", [-3_600_000, 3_600_000])
def test_a_client_whose_clock_is_an_hour_off_gets_the_servers_stamp(client, identity, store, skew_ms):
    lie = store.now_ms() + skew_ms
    source_id = client.publish(identity, p2p.WorkerMetadata(updated_at=lie), "w")
    listing = client.list_sources()
    assert abs(listing.instances[0].updated_at - listing.server_time_ms) < 60_000
    assert abs(client.get_metadata(source_id, "w").worker.updated_at - listing.server_time_ms) < 60_000


def test_a_silent_source_is_listed_as_stale_and_then_not_at_all(client, identity, clock):
    source_id = client.publish(identity, p2p.WorkerMetadata(), "w")
    client.update_status(source_id, "w", 0, READY)
    clock.now += 90
    assert client.list_sources(status=READY).instances == ()
    assert client.list_sources(status=STALE).instances[0].worker_id == "w"
    assert client.get_metadata(source_id, "w").worker.status == STALE
    clock.now += 600
    assert client.get_metadata(source_id, "w") is None


def test_unknown_enum_values_are_refused_with_the_known_ones(raw):
    identity = p2p.SourceIdentity(model_name="m")
    assert "1 SOURCE_STATUS_INITIALIZING" in refusal(
        raw["UpdateStatus"], p2p.UpdateStatusRequest(mx_source_id="x", worker_id="w", status=99)
    )
    publish = p2p.PublishMetadataRequest(identity=identity, worker_id="w")
    publish.worker.status = -1
    assert "status=-1" in refusal(raw["PublishMetadata"], publish)
    publish = p2p.PublishMetadataRequest(identity=identity, worker_id="w")
    publish.identity.backend_framework = 77
    assert "backend_framework=77" in refusal(raw["PublishMetadata"], publish)
    assert "status_filter=9" in refusal(raw["ListSources"], p2p.ListSourcesRequest(status_filter=9))
    listing = p2p.ListSourcesRequest(identity=identity)
    listing.identity.mx_source_type = 55
    assert "mx_source_type=55" in refusal(raw["ListSources"], listing)


def test_empty_and_endless_names_are_refused(raw):
    assert "worker_id is empty" in refusal(
        raw["PublishMetadata"], p2p.PublishMetadataRequest(identity=p2p.SourceIdentity(model_name="m"))
    )
    assert "model_name is empty" in refusal(raw["PublishMetadata"], p2p.PublishMetadataRequest(worker_id="w"))
    assert "mx_source_id is empty" in refusal(raw["GetMetadata"], p2p.GetMetadataRequest(worker_id="w"))
    assert "worker_id is empty" in refusal(raw["UpdateStatus"], p2p.UpdateStatusRequest(mx_source_id="x"))
    assert "at most 4096" in refusal(raw["GetMetadata"], p2p.GetMetadataRequest(mx_source_id="x", worker_id="w" * 5000))


def test_an_oversized_record_is_refused_with_the_way_out(identity):
    worker = p2p.WorkerMetadata(nixl_metadata=b"x" * 2000)
    with (
        DirectoryServer("127.0.0.1:0", max_record_bytes=1000) as server,
        DirectoryClient(server.address) as client,
        pytest.raises(DirectoryRefused, match="serve them from the worker's GetTensorManifest"),
    ):
        client.publish(identity, worker, "w")


def test_a_manifest_of_a_hundred_thousand_tensors_passes(client, identity):
    worker = p2p.WorkerMetadata()
    worker.tensor_source.tensors.extend(
        p2p.TensorDescriptor(name=f"model.layers.{i}.mlp.experts.gate_proj.weight", addr=i, size=8) for i in range(100_000)
    )
    source_id = client.publish(identity, worker, "w")
    assert worker.ByteSize() > 4 << 20
    assert len(client.get_metadata(source_id, "w").worker.tensor_source.tensors) == 100_000


def test_health_answers_for_the_server_and_for_the_service(server):
    with grpc.insecure_channel(server.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for name in ("", "model_express.p2p.P2pService"):
            answer = check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_describes_our_own_protocol_with_its_extensions(server):
    with grpc.insecure_channel(server.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"model_express.p2p.P2pService", "grpc.health.v1.Health"} <= set(database.get_services())
        file = database.FindFileContainingSymbol("model_express.p2p.ListSourcesResponse")
        assert isinstance(file, descriptor_pb2.FileDescriptorProto)
        (message,) = [m for m in file.message_type if m.name == "ListSourcesResponse"]
        assert [f.number for f in message.field] == [1, 1000]
        assert database.FindFileContainingSymbol("grpc.health.v1.Health").package == "grpc.health.v1"


def test_a_port_belongs_to_one_server(server):
    with pytest.raises(DirectoryUnavailable, match=r"cannot serve a directory on 127.0.0.1:\d+: .*in use"):
        DirectoryServer(server.address).start()


def test_a_stopped_server_leaves_no_thread_and_frees_its_port():
    first = DirectoryServer("127.0.0.1:0").start()
    address = first.address
    first.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "mx-grpc"]
    with pytest.raises(DirectoryUnavailable, match="call start"):
        _ = first.address
    with DirectoryServer(address) as second:
        assert second.address == address
