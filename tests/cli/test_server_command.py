"""What `mx server` promises."""

from __future__ import annotations

import signal

import pytest

from mx_common.directory import DirectoryClient


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_says_where_it_serves_and_ends_on_a_signal(start_mx, register, number, code):
    server = start_mx("server", "--address", "127.0.0.1:0")
    line = server.lines[server.wait_for("replicas find it with: export MX_SERVER_ADDRESS=")]
    address = line.rpartition("=")[2]
    register(address, "w")
    with DirectoryClient(address, timeout=10) as client:
        assert [ref.worker_id for ref in client.list_sources().instances] == ["w"]
    assert server.end(number) == code
    server.wait_for(f"directory stopped by {signal.Signals(number).name}")


def test_a_wildcard_address_is_shown_as_one_that_replicas_can_use(start_mx):
    server = start_mx("server", "--address", "0.0.0.0:0")
    line = server.lines[server.wait_for("export MX_SERVER_ADDRESS=")]
    assert "=0.0.0.0" not in line
    assert not line.endswith(":0")


def test_a_taken_port_is_refused_with_the_address_and_a_way_to_see_who_has_it(mx, directory):
    done = mx("server", "--address", directory.address)
    assert (done.code, done.out) == (1, "")
    message = done.err.splitlines()[-1]
    assert message.startswith(f"mx: cannot serve a directory on {directory.address}")
    assert "in use" in message
    assert "ss -ltnp" in message
    assert "Traceback" not in done.err


@pytest.mark.parametrize("arguments", [["--address", "8001"], ["--address", "127.0.0.1:99999"], ["--store", "disk"]])
def test_a_malformed_address_or_store_is_wrong_usage(mx, arguments):
    done = mx("server", *arguments)
    assert done.code == 64
    assert "host:port" in done.err or "redis://" in done.err


def test_ages_that_contradict_each_other_are_refused_before_anything_listens(mx):
    done = mx("server", "--address", "127.0.0.1:0", MX_STALE_SECONDS="90", MX_REMOVE_SECONDS="30")
    assert done.code == 1
    assert "MX_REMOVE_SECONDS=30" in done.err
