"""Records that lie, memory that runs out, sources that end: each costs a source at most, and leaves nothing behind."""

from __future__ import annotations

import gc
import socket
import weakref

import pytest

from mx_common.errors import TransferError
from mx_common.load import Source, load
from tests.support.toy import ToyEngine, holds, job, log, policy_that_prefers


@pytest.mark.parametrize(
    "change",
    [
        {"worker_rank": 1},
        {"worker_grpc_endpoint": "127.0.0.1:" + "9" * 5000},
        {"worker_grpc_endpoint": "", "metadata_endpoint": "127.0.0.1:\u00b2"},
        {"worker_grpc_endpoint": "", "metadata_endpoint": "127.0.0.1:99999999999"},
        {"nixl_metadata": b"\xff\xfe garbage"},
        {"nixl_metadata": b""},
        {"worker_grpc_endpoint": "", "nixl_metadata": b""},
    ],
    ids=[
        "another rank by now",
        "endless port",
        "port of another script",
        "huge port",
        "garbage metadata",
        "no metadata",
        "nothing",
    ],
)
def test_a_record_that_is_wrong_costs_the_source_and_not_the_load(start_source, directory, monkeypatch, change):
    start_source("w1", env={"MX_HEARTBEAT_SECONDS": "60"})
    policy = policy_that_prefers("w1")
    order = policy.order

    def spoil_then_order(candidates, target):
        republish(directory.address, "w1", change)
        return order(candidates, target)

    policy.order = spoil_then_order
    with policy:
        loaded = load(job("target", selector="prefer", stall_timeout=2.0), ToyEngine(storage_seed=3), log)
    assert len(loaded.reasons) == 1
    assert loaded.reasons[0].startswith("source 1, worker w1: ")
    assert holds(loaded.tensors, 3)


def test_a_model_that_cannot_be_built_for_receiving_is_read_from_storage(start_source):
    class Crowded(ToyEngine):
        def build(self):
            super().build()
            raise MemoryError("the device is full")

    start_source("w1")
    engine = Crowded(storage_seed=3)
    loaded = load(job("target"), engine, log)
    assert loaded.reasons == ("this node: MemoryError: the device is full",)
    assert holds(loaded.tensors, 3)
    assert engine.discarded == 1


def test_a_closed_source_lets_its_tensors_go(directory):
    engine = ToyEngine(storage_seed=3)
    loaded = load(job("w1"), engine, log)
    source = Source.start(job("w1"), loaded, ready=lambda: True, serving=None, log=log)
    assert source.publisher.wait_ready(10)
    held = [weakref.ref(tensor) for tensor in loaded.tensors.values()]
    source.close()
    engine.discard()
    del loaded
    gc.collect()
    assert [ref for ref in held if ref() is not None] == []


def test_a_source_that_cannot_announce_itself_leaves_nothing_open(directory, monkeypatch, free_port, caplog):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        monkeypatch.setenv("MX_WORKER_PORT", str(free_port))
        loaded = load(job("w1"), ToyEngine(storage_seed=3), log)
        assert Source.start(job("w1"), loaded, ready=lambda: True, serving=None, log=log) is None
    assert "does not serve its weights to others" in caplog.text
    with pytest.raises(TransferError):
        loaded.transport.metadata()


def republish(address, worker_id, change):
    """Replaces fields of a worker's record, as a restarted or broken worker would."""
    from mx_common.directory import DirectoryClient
    from mx_common.wire import p2p
    from mx_common.wire.identity import identity_from_proto

    with DirectoryClient(address) as client:
        (ref,) = client.list_sources(model_name="toy/model").instances
        record = client.get_metadata(ref.mx_source_id, ref.worker_id)
        for name, value in change.items():
            setattr(record.worker, name, value)
        client.publish(identity_from_proto(record.identity), record.worker, worker_id)
        client.update_status(ref.mx_source_id, worker_id, record.worker.worker_rank, p2p.SOURCE_STATUS_READY)
