"""Fixtures of every test folder."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture
def free_port():
    """A TCP port on loopback at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
