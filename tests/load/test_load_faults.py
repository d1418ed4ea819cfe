"""What can go wrong with a source ends in another source or in storage, with the reason, and never in mixed weights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mx_common.directory import DirectoryServer, MemoryStore
from mx_common.load import Loaded, Source, load
from tests.support.process import Process
from tests.support.toy import ToyEngine, holds, job, log, policy_that_prefers

BIG = {"count": 8, "nbytes": 48 << 20}


@pytest.fixture
def over_tcp(monkeypatch):
    """Reads go through sockets, where a source has to take part and an aborted read may still write."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    return {"UCX_TLS": "tcp"}


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("kill", "SourceLost"),
        ("stop", "TransferTimeout"),
        ("overwrite", "DigestMismatch"),
        ("revoke", "SourceLost: the read lease"),
    ],
    ids=["killed", "stopped", "overwriting its tensors", "revoking the lease"],
)
def test_a_source_that_fails_mid_read_is_replaced_by_the_next_and_nothing_is_mixed(start_source, over_tcp, fault, says):
    start_source("bad", seed=1, fault=fault, after=0.1, env=over_tcp, **BIG)
    start_source("good", seed=2, env=over_tcp, **BIG)
    engine = ToyEngine(**BIG)
    with policy_that_prefers("bad"):
        loaded = load(job("target", selector="prefer", stall_timeout=2.0), engine, log)

    assert loaded.source_worker_id == "good"
    assert holds(loaded.tensors, 2, **BIG)
    (reason,) = loaded.reasons
    assert says in reason
    assert engine.built == 2, "bytes had moved: the model had to be made anew"
    assert engine.discarded == 1
    loaded.transport.close()


def test_a_source_that_fails_mid_read_leaves_a_clean_storage_load(start_source, over_tcp):
    bad = start_source("bad", seed=1, fault="stop", after=0.1, env=over_tcp, **BIG)
    engine = ToyEngine(storage_seed=7, **BIG)
    loaded = load(job("target", stall_timeout=1.0), engine, log)
    assert holds(loaded.tensors, 7, **BIG)
    assert (engine.built, engine.discarded, engine.from_storage) == (1, 1, 1)
    bad.signal(signal.SIGCONT)
    time.sleep(1.0)
    assert holds(loaded.tensors, 7, **BIG), "late bytes of the aborted read landed in the new model"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ("missing", "the source lacks layers.0.weight"),
        ("extra", "the source has ghost, which the target does not"),
        ("resized", "of another size: layers.1.weight (1048574 bytes there, 1048576 here)"),
        ("retyped", "of another dtype: layers.1.weight (torch.float16 there, torch.bfloat16 here)"),
        ("relaid", "of another layout: layers.1.weight (3x5 there, 524288 here)"),
        ("zero-byte", "the source lacks layers.1.weight"),
        ("duplicate", "layers.0.weight listed more than once"),
        ("nameless", "a tensor without a name"),
    ],
)
def test_a_manifest_that_does_not_fit_moves_no_byte(start_source, records, edit, says):
    start_source("w1", edit=edit)
    engine = ToyEngine(storage_seed=3)
    loaded = load(job("target"), engine, log)
    assert says in loaded.reasons[0]
    assert holds(loaded.tensors, 3)
    (record,) = records()
    assert (record["verdict"], record["wire_bytes"], record["fallback"]) == ("unmeasured", 0, True), "storage had to do"


def test_an_empty_tensor_on_one_side_only_does_not_matter(start_source):
    start_source("w1", seed=4, edit="empty-extra")
    loaded = load(job("target"), ToyEngine(), log)
    assert holds(loaded.tensors, 4)
    assert loaded.source_worker_id == "w1"
    loaded.transport.close()


def test_a_wrong_digest_is_never_installed_and_names_the_tensor(start_source):
    start_source("w1", edit="digest")
    loaded = load(job("target"), ToyEngine(storage_seed=3), log)
    assert "DigestMismatch: 1 of 8 tensors differ from what the source published (layers.1.weight)" in loaded.reasons[0]
    assert holds(loaded.tensors, 3)


def test_an_address_the_source_never_registered_is_an_error_and_not_a_crash(start_source):
    start_source("w1", edit="elsewhere")
    loaded = load(job("target"), ToyEngine(storage_seed=3), log)
    assert "TransferError" in loaded.reasons[0]
    assert holds(loaded.tensors, 3)


def test_a_rate_above_the_ceiling_is_not_installed(start_source, monkeypatch, records):
    monkeypatch.setenv("MX_RESHARD_MAX_GBPS", "0.000001")
    start_source("w1", nbytes=16 << 20)
    loaded = load(job("target"), ToyEngine(nbytes=16 << 20, storage_seed=3), log)
    assert "ImpossibleThroughput" in loaded.reasons[0]
    assert holds(loaded.tensors, 3, nbytes=16 << 20)
    assert "impossible" in {record.get("verdict") for record in records()}


def test_a_slow_transfer_is_recorded_and_still_installed(start_source, monkeypatch, records):
    monkeypatch.setenv("MX_RESHARD_MIN_GBPS", "100000")
    start_source("w1", nbytes=16 << 20)
    loaded = load(job("target"), ToyEngine(nbytes=16 << 20), log)
    assert holds(loaded.tensors, 1, nbytes=16 << 20)
    assert "refit-slow-throughput-v1" in {record["schema"] for record in records()}
    loaded.transport.close()


def test_a_server_that_is_down_costs_the_sources_and_not_the_load(monkeypatch, free_port):
    monkeypatch.setenv("MX_SERVER_ADDRESS", f"127.0.0.1:{free_port}")
    monkeypatch.setenv("MX_RPC_TIMEOUT", "1")
    loaded = load(job("target"), ToyEngine(storage_seed=2), log)
    source = Source.start(job("target"), loaded, ready=lambda: True, serving=None, log=log)
    assert holds(loaded.tensors, 2)
    assert "MX_SERVER_ADDRESS" in loaded.reasons[0]
    with DirectoryServer(f"127.0.0.1:{free_port}"):
        assert source.publisher.wait_ready(30), "the source registers once the server is up"
        source.close()


def test_a_server_that_dies_during_the_transfer_does_not_stop_it(start_source, directory, over_tcp):
    child = start_source("w1", seed=3, env=over_tcp, **BIG)
    engine = ToyEngine(**BIG)
    done = {}
    thread = threading.Thread(target=lambda: done.update(loaded=load(job("target"), engine, log)))
    thread.start()
    child.expect("leased")
    directory.stop()
    thread.join(60)
    assert done["loaded"].source_worker_id == "w1"
    assert holds(done["loaded"].tensors, 3, **BIG)
    done["loaded"].transport.close()
    assert child.popen.poll() is None


def test_a_server_restarted_empty_gets_its_sources_back(start_source, directory):
    start_source("w1", seed=3)
    address = directory.address
    directory.stop()
    with DirectoryServer(address):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            loaded = load(job("target"), ToyEngine(storage_seed=9), log)
            if loaded.pulled is not None:
                break
            time.sleep(0.3)
        assert holds(loaded.tensors, 3)
        loaded.transport.close()


def test_a_source_whose_port_another_process_took_is_recognised(start_source, directory, tmp_path):
    gone = start_source("gone", seed=1)
    endpoint = control_endpoint(directory.address)
    gone.signal(signal.SIGKILL)
    gone.popen.wait(10)
    # the same host does not tell the target that this worker has ended: it is to find out at the port
    (tmp_path / "run" / "workers" / "gone").unlink()
    host, _, port = endpoint.rpartition(":")
    start_source("squatter", seed=2, model_port=port, env={"MX_WORKER_PORT": port, "MX_ADVERTISE_HOST": host}, rank=0)
    with policy_that_prefers("gone"):
        loaded = load(job("target", selector="prefer"), ToyEngine(), log)
    assert "worker squatter answers here, not 'gone'" in loaded.reasons[0]
    assert loaded.source_worker_id == "squatter"
    assert holds(loaded.tensors, 2)
    loaded.transport.close()


def test_a_source_of_this_host_whose_process_has_ended_is_dropped_before_it_is_tried(start_source):
    killed = start_source("killed")
    killed.signal(signal.SIGKILL)
    killed.popen.wait(10)
    loaded = load(job("target"), ToyEngine(storage_seed=2), log)
    assert "killed: a process of this host that has ended" in loaded.reasons[0]


def test_a_process_killed_between_registration_and_ready_is_never_used(start_source, directory):
    child = start_source("half", ready=False)
    child.signal(signal.SIGKILL)
    child.popen.wait(10)
    loaded = load(job("target"), ToyEngine(storage_seed=2), log)
    assert holds(loaded.tensors, 2)
    assert loaded.pulled is None


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_directory_whose_clock_is_an_hour_off_lists_usable_sources(monkeypatch, hours, tmp_path):
    store = MemoryStore(stale_seconds=90, remove_seconds=600, wall=lambda: time.time() + hours * 3600)
    with DirectoryServer("127.0.0.1:0", store) as server:
        monkeypatch.setenv("MX_SERVER_ADDRESS", server.address)
        source = Source.start(
            job("w1"), Loaded(ToyEngine(storage_seed=6).load_from_storage()), ready=lambda: True, serving=None, log=log
        )
        assert source.publisher.wait_ready(10)
        loaded = load(job("target"), ToyEngine(), log)
        assert holds(loaded.tensors, 6)
        assert loaded.source_worker_id == "w1"
        loaded.transport.close()
        source.close()


@pytest.mark.parametrize("value", ["not json", "[1]", '{"rack": 3}', '{"rack": null}'])
def test_a_malformed_topology_costs_the_topology_and_not_the_load(start_source, monkeypatch, value):
    start_source("w1", seed=5, env={"MX_P2P_TOPOLOGY": value})
    monkeypatch.setenv("MX_P2P_TOPOLOGY", value)
    loaded = load(job("target", selector="topology_aware"), ToyEngine(), log)
    assert holds(loaded.tensors, 5)
    loaded.transport.close()


def test_a_load_that_is_not_a_number_does_not_disturb_the_order(directory, start_source):
    from mx_common.directory import DirectoryClient
    from mx_common.wire import p2p

    start_source("w1", seed=5, env={"MX_HEARTBEAT_SECONDS": "60"})
    with DirectoryClient(directory.address) as client:
        (ref,) = client.list_sources(model_name="toy/model").instances
        client.update_status(ref.mx_source_id, "w1", 0, p2p.SOURCE_STATUS_READY, float("nan"))
    for policy in ("random", "rendezvous_hash", "load_aware", "topology_aware", "balanced"):
        loaded = load(job("target", selector=policy), ToyEngine(), log)
        assert holds(loaded.tensors, 5)
        loaded.transport.close()


@pytest.mark.parametrize(
    ("name", "usable"),
    [
        (b"MX_LOAD_FALLBACK", False),
        (b"MX_P2P_TOPOLOGY", True),
        (b"MX_P2P_LOAD_WEIGHT", True),
        (b"MX_P2P_SOURCE_SELECTOR", True),
    ],
)
def test_a_value_that_is_not_utf8_is_named_or_ignored_with_a_warning_and_never_a_traceback(name, usable):
    code = (
        "from mx_common.load import Settings\n"
        "from mx_common.errors import ConfigError\n"
        "from mx_common.selection import get_configured_selector, get_selector\n"
        "from mx_common.topology import local_topology\n"
        "try:\n    Settings.resolve(); get_selector('load_aware'); get_configured_selector(); local_topology(); print('usable')\n"
        "except ConfigError as error:\n    print('refused', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environb, name: b"\xff\xfe"}, capture_output=True, check=True)
    assert done.stdout.startswith(b"usable" if usable else b"refused " + name), done.stdout
    assert name in done.stdout + done.stderr
    assert b"Traceback" not in done.stderr


def test_an_interrupted_target_holds_its_lease_no_longer_than_it_lives(start_source, directory, over_tcp, tmp_path):
    source = start_source("w1", env={**over_tcp, "MX_LEASE_SECONDS": "3"}, **BIG)
    code = f"from tests.support.toy import *\nfrom mx_common.load import load\nload(job('t'), ToyEngine(**{BIG!r}), log)"
    child = Process(
        "-c", code, env={**over_tcp, "MX_SERVER_ADDRESS": directory.address, "MX_RUNTIME_DIR": str(tmp_path / "run")}
    )
    source.expect("leased")
    child.signal(signal.SIGINT)
    child.end()
    deadline = time.monotonic() + 20
    while readers(directory.address) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert readers(directory.address) == 0


# Helpers ---------------------------------------------------------------------------------------------------------------


def readers(address):
    from mx_common.directory import DirectoryClient

    with DirectoryClient(address) as client:
        return sum(ref.reads_in_flight for ref in client.list_sources(model_name="toy/model").instances)


def control_endpoint(address):
    from mx_common.directory import DirectoryClient

    with DirectoryClient(address) as client:
        (ref,) = client.list_sources(model_name="toy/model").instances
        return client.get_metadata(ref.mx_source_id, ref.worker_id).worker.worker_grpc_endpoint
