"""Fixtures that start sources and open transports, and end them whatever the test does."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transport_peers import Source, unique

from mx_common.errors import TransferError
from mx_common.transport.nixl import NixlTransport


@pytest.fixture
def start_source() -> Iterator[Callable[..., Source]]:
    """Start a source process; keyword arguments of `Source.start`."""
    started: list[Source] = []

    def start(name: str = "", **how: Any) -> Source:
        started.append(Source.start(name or unique("source"), **how))
        return started[-1]

    yield start
    for source in started:
        source.end()


@pytest.fixture
def open_nixl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., NixlTransport]]:
    """Open a NIXL transport in this process, with UCX_TLS as asked."""
    opened: list[NixlTransport] = []

    def open_one(name: str = "", *, tls: str = "", **how: Any) -> NixlTransport:
        if tls:
            monkeypatch.setenv("UCX_TLS", tls)
        else:
            monkeypatch.delenv("UCX_TLS", raising=False)
        opened.append(NixlTransport(name or unique("reader"), **how))
        return opened[-1]

    yield open_one
    for transport in opened:
        try:
            transport.close()
        except TransferError:
            continue  # a test that keeps an agent alive on purpose has looked at it


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
