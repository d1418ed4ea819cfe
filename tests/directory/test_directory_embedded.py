"""The embedded directory: who hosts it, who finds it, who takes it over, and what is never used as one."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from mx_common.directory import DirectoryClient, DirectoryServer, ensure_directory, resolve
from mx_common.directory.embedded import hosted_here, stop_hosting
from mx_common.errors import ConfigError, DirectoryUnavailable
from mx_common.wire import p2p

READY = p2p.SOURCE_STATUS_READY


@pytest.fixture
def embedded_at(free_port, monkeypatch):
    address = f"127.0.0.1:{free_port}"
    monkeypatch.setenv("MX_EMBEDDED_ADDRESS", address)
    return address


def test_a_given_address_wins_then_the_environment_and_neither_binds(embedded_at, monkeypatch):
    monkeypatch.setenv("MX_SERVER_ADDRESS", "directory:8001")
    assert resolve("10.0.0.5:9") == "10.0.0.5:9"
    assert resolve() == "directory:8001"
    assert hosted_here() is None


def test_a_malformed_server_address_is_named(monkeypatch):
    monkeypatch.setenv("MX_SERVER_ADDRESS", "directory")
    with pytest.raises(ConfigError, match="MX_SERVER_ADDRESS='directory'"):
        resolve()


def test_the_first_process_hosts_once_however_many_threads_ask(embedded_at):
    found = []
    threads = [threading.Thread(target=lambda: found.append(resolve())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [embedded_at] * 8
    assert hosted_here() == embedded_at


def test_localhost_means_the_ipv4_loopback_in_every_process(free_port, monkeypatch):
    monkeypatch.setenv("MX_EMBEDDED_ADDRESS", f"localhost:{free_port}")
    assert ensure_directory() == f"127.0.0.1:{free_port}"


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.5", "some-node"])
def test_the_embedded_directory_never_binds_beyond_loopback(host, free_port, monkeypatch):
    monkeypatch.setenv("MX_EMBEDDED_ADDRESS", f"{host}:{free_port}")
    with pytest.raises(ConfigError, match=r"MX_EMBEDDED_ADDRESS=.* is not a loopback address.*mx server"):
        ensure_directory()
    assert hosted_here() is None


def test_a_directory_of_another_process_is_used(embedded_at, spawn):
    spawn("serve", embedded_at).expect("serving")
    assert resolve() == embedded_at
    assert hosted_here() is None


def test_of_processes_that_race_for_the_port_exactly_one_hosts(spawn, free_port):
    address = f"127.0.0.1:{free_port}"
    start_at = time.time() + 4
    racers = [spawn("race", start_at, env={"MX_EMBEDDED_ADDRESS": address}) for _ in range(6)]
    answers = [racer.expect("resolved") for racer in racers]
    assert sorted(answers) == [f"{address} guest"] * 5 + [f"{address} hosting"]


@pytest.mark.parametrize("kind", ["http", "silent"])
def test_a_foreign_process_on_the_port_is_named_with_the_way_out(spawn, embedded_at, free_port, monkeypatch, kind):
    spawn("foreign", kind, free_port).expect("listening")
    monkeypatch.setenv("MX_RPC_TIMEOUT", "1")
    with pytest.raises(DirectoryUnavailable) as caught:
        resolve()
    assert f"another process has {embedded_at}" in str(caught.value)
    assert "MX_EMBEDDED_ADDRESS" in str(caught.value)
    assert hosted_here() is None


def test_a_grpc_server_that_is_no_directory_is_refused_at_once(spawn, embedded_at, free_port):
    spawn("foreign", "grpc", free_port).expect("listening")
    with pytest.raises(ConfigError, match=f"MX_EMBEDDED_ADDRESS={embedded_at} belongs to a gRPC server that is no directory"):
        resolve()


def test_a_host_that_stops_hosting_is_replaced_on_the_next_request(embedded_at, spawn):
    host = spawn("race", 0, env={"MX_EMBEDDED_ADDRESS": embedded_at})
    assert host.expect("resolved") == f"{embedded_at} hosting"
    assert resolve() == embedded_at
    host.kill()
    assert resolve() == embedded_at
    assert hosted_here() == embedded_at
    stop_hosting()
    assert hosted_here() is None


def test_when_the_hosting_source_is_killed_another_takes_over_and_all_come_back(spawn, embedded_at, eventually):
    env = {"MX_EMBEDDED_ADDRESS": embedded_at}
    host = spawn("source", "host", env=env)
    assert host.expect("ready").endswith("hosting")
    guests = [spawn("source", f"guest-{n}", env=env) for n in range(2)]
    assert all(guest.expect("ready").endswith("guest") for guest in guests)

    def ready():
        with DirectoryClient(embedded_at, timeout=5) as client:
            try:
                return {i.worker_id for i in client.list_sources(status=READY).instances}
            except DirectoryUnavailable:
                return set()

    assert ready() == {"host", "guest-0", "guest-1"}
    host.kill(signal.SIGKILL)
    eventually(lambda: ready() == {"guest-0", "guest-1"}, "both guests are listed by the directory that took over")
    assert all(guest.popen.poll() is None for guest in guests)


def test_a_forked_child_does_not_believe_that_it_hosts(embedded_at):
    ensure_directory()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"hosts" if hosted_here() else b"guest")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 5) == b"guest"
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("grpc_handles_forks", ["0", "1"])
def test_a_forked_child_of_a_dead_host_does_not_keep_the_port(spawn, embedded_at, grpc_handles_forks):
    env = {"MX_EMBEDDED_ADDRESS": embedded_at, "GRPC_ENABLE_FORK_SUPPORT": grpc_handles_forks}
    host = spawn("host_with_forked_child", env=env)
    child = int(host.expect(f"hosting {embedded_at}"))
    assert resolve() == embedded_at
    assert hosted_here() is None
    host.kill()
    try:
        os.kill(child, 0)
        assert resolve() == embedded_at
        assert hosted_here() == embedded_at
    finally:
        os.kill(child, signal.SIGKILL)


def test_an_explicit_server_and_the_embedded_one_do_not_share_a_port(embedded_at):
    ensure_directory()
    with pytest.raises(DirectoryUnavailable, match="in use"):
        DirectoryServer(embedded_at).start()
