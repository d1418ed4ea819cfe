"""Fixtures of every test folder."""

from __future__ import annotations

import json
import socket

import pytest

pytest.register_assert_rewrite("tests.support")  # what is asserted there is shown as in a test


@pytest.fixture
def free_port():
    """A TCP port on loopback at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(autouse=True)
def nothing_was_warned_about_yet(monkeypatch):
    """Warnings that are said once in a process are said once in a test."""
    from mx_common import _env_rows, _once

    monkeypatch.setattr(_once, "_said", set())
    monkeypatch.setattr(_env_rows, "_warned", set())


@pytest.fixture
def directory(monkeypatch):
    """A directory on loopback, which this process and its children find."""
    from mx_common.directory import DirectoryServer

    with DirectoryServer("127.0.0.1:0") as server:
        monkeypatch.setenv("MX_SERVER_ADDRESS", server.address)
        yield server


@pytest.fixture
def records(tmp_path):
    """The transfer records written so far, where MX_RECORDS_FILE lies in `tmp_path`."""

    def read():
        return [json.loads(line) for path in sorted(tmp_path.glob("records*")) for line in path.read_text().splitlines()]

    return read
