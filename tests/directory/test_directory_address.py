"""Which addresses are taken, and which are refused before anything is dialled."""

from __future__ import annotations

import pytest

from mx_common.directory import DirectoryClient, WorkerClient
from mx_common.directory.address import Address, host_towards
from mx_common.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:8001", "127.0.0.1", 8001, True),
        ("localhost:1", "localhost", 1, True),
        ("[::1]:8001", "::1", 8001, True),
        ("127.8.9.10:8001", "127.8.9.10", 8001, True),
        ("10.0.0.5:65535", "10.0.0.5", 65535, False),
        ("mx-server.default.svc.cluster.local:8001", "mx-server.default.svc.cluster.local", 8001, False),
        (" http://directory:8001/ ", "directory", 8001, False),
        ("[fe80::1]:9", "fe80::1", 9, False),
    ],
)
def test_an_address_is_read_and_written_back(text, host, port, loopback):
    address = Address.parse(text)
    assert (address.host, address.port, address.is_loopback) == (host, port, loopback)
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8001",
        ":8001",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "host:80x",
        "host:٣",
        "300.1.1.1:80",
        "1.2.3:80",
        "::1:8001",
        "[::1:8001",
        "[127.0.0.1]:80",
        "https://host:80",
        "dns:///host:80",
        "unix:/run/mx.sock",
        "a b:80",
        "a/b:80",
        "-host:80",
        "host..x:80",
        "h\udcff:80",
        "x" * 300 + ":80",
    ],
)
def test_a_malformed_address_is_refused_up_front_with_an_example(text):
    with pytest.raises(ConfigError, match="write host:port, for example"):
        Address.parse(text, what="MX_SERVER_ADDRESS")
    with pytest.raises(ConfigError, match="directory address="):
        DirectoryClient(text)
    with pytest.raises(ConfigError, match="worker endpoint="):
        WorkerClient(text, "source")


def test_the_message_names_the_setting():
    with pytest.raises(ConfigError, match="MX_SERVER_ADDRESS='nowhere' has no host or no port"):
        Address.parse("nowhere", what="MX_SERVER_ADDRESS")


def test_port_zero_is_for_binding_only():
    assert Address.parse("127.0.0.1:0", binding=True).port == 0
    with pytest.raises(ConfigError, match="from 1 to 65535"):
        Address.parse("127.0.0.1:0")


def test_the_host_towards_a_loopback_directory_is_loopback():
    assert host_towards(Address("127.0.0.1", 8001)) == "127.0.0.1"
    assert host_towards(Address("no-such-host.invalid", 8001)) == "127.0.0.1"
