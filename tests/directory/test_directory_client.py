"""What a client does when the directory is not there, comes late, or is something else."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from mx_common.directory import DirectoryClient, DirectoryServer
from mx_common.errors import ConfigError, DirectoryRefused, DirectoryUnavailable
from mx_common.wire import p2p


def test_a_directory_that_is_down_is_named_with_call_time_and_advice(free_port):
    with (
        DirectoryClient(f"127.0.0.1:{free_port}", timeout=0.5) as client,
        pytest.raises(DirectoryUnavailable) as caught,
    ):
        client.list_sources()
    message = str(caught.value)
    assert f"ListSources to the directory 127.0.0.1:{free_port} failed after " in message
    assert "attempts" in message
    assert "MX_SERVER_ADDRESS" in message


def test_the_timeout_covers_every_retry_and_comes_from_the_environment(free_port, monkeypatch):
    monkeypatch.setenv("MX_RPC_TIMEOUT", "0.7")
    started = time.monotonic()
    with DirectoryClient(f"127.0.0.1:{free_port}") as client, pytest.raises(DirectoryUnavailable):
        client.list_sources()
    assert time.monotonic() - started < 5


def test_a_bad_timeout_is_refused_with_its_name(free_port, monkeypatch):
    monkeypatch.setenv("MX_RPC_TIMEOUT", "soon")
    with DirectoryClient(f"127.0.0.1:{free_port}") as client, pytest.raises(ConfigError, match="MX_RPC_TIMEOUT='soon'"):
        client.list_sources()


def test_a_directory_that_comes_up_during_the_call_is_reached(free_port, identity):
    server = DirectoryServer(f"127.0.0.1:{free_port}")
    late = threading.Timer(0.7, server.start)
    late.start()
    try:
        with DirectoryClient(f"127.0.0.1:{free_port}", timeout=20) as client:
            assert client.publish(identity, p2p.WorkerMetadata(), "w")
    finally:
        late.join()
        server.stop()


def test_without_retries_a_refused_connection_is_one_attempt(free_port):
    with (
        DirectoryClient(f"127.0.0.1:{free_port}", timeout=20, retry=False) as client,
        pytest.raises(DirectoryUnavailable, match="1 attempt "),
    ):
        client.list_sources()


def test_a_refusal_is_not_repeated(client):
    with pytest.raises(
        DirectoryRefused, match=r"GetMetadata was refused by the directory .* 1 attempt .*mx_source_id is empty"
    ):
        client.get_metadata("", "w")


def test_a_directory_that_stops_answering_costs_the_timeout_and_no_more(spawn):
    server = spawn("serve", "127.0.0.1:0")
    address = server.expect("serving")
    with DirectoryClient(address, timeout=1) as client:
        client.list_sources()
        os.kill(server.popen.pid, signal.SIGSTOP)
        with pytest.raises(DirectoryUnavailable, match=f"{address} failed after 1.*DEADLINE_EXCEEDED"):
            client.list_sources()
        os.kill(server.popen.pid, signal.SIGCONT)
        client.list_sources()


def test_a_directory_killed_during_use_is_unavailable_and_a_new_one_is_found(spawn):
    server = spawn("serve", "127.0.0.1:0")
    address = server.expect("serving")
    with DirectoryClient(address, timeout=20) as client:
        client.list_sources()
        server.kill()
        with DirectoryClient(address, timeout=0.5) as impatient, pytest.raises(DirectoryUnavailable):
            impatient.list_sources()
        spawn("serve", address).expect("serving")
        assert client.list_sources().instances == ()


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_another_kind_of_server_is_not_taken_for_a_directory(spawn, free_port, kind):
    spawn("foreign", kind, free_port).expect("listening")
    with (
        DirectoryClient(f"127.0.0.1:{free_port}", timeout=1) as client,
        pytest.raises((DirectoryRefused, DirectoryUnavailable), match=f"directory 127.0.0.1:{free_port}"),
    ):
        client.list_sources()


def test_a_proxy_of_the_environment_is_not_used_for_loopback(spawn, server, monkeypatch, free_port):
    for name in ("grpc_proxy", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port}")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with DirectoryClient(server.address, timeout=10) as client:
        assert client.list_sources().instances == ()


def test_a_closed_client_says_so(server):
    client = DirectoryClient(server.address, timeout=1)
    client.close()
    with pytest.raises(DirectoryUnavailable, match="closed"):
        client.list_sources()
