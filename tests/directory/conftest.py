"""Servers on loopback and processes of their own for the directory's tests; everything that a test starts ends with it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from mx_common.directory import DirectoryClient, DirectoryServer, MemoryStore
from mx_common.directory.embedded import stop_hosting
from mx_common.identity import Identity
from tests.support.process import Process

CHILD = Path(__file__).with_name("directory_child.py")
WAIT_SECONDS = 30


class Child(Process):
    """A child running one role of `directory_child.py`."""

    def __init__(self, role, *arguments, env=None):
        super().__init__(CHILD, role, *arguments, env=env)

    def rest(self):
        """Every line until the process has ended, those already seen included."""
        return self.output(WAIT_SECONDS).splitlines()

    def kill(self, number=signal.SIGKILL):
        self.signal(number)
        return self.popen.wait(WAIT_SECONDS)


@pytest.fixture
def spawn():
    started = []

    def start(role, *arguments, env=None):
        process = Child(role, *arguments, env=env)
        started.append(process)
        return process

    yield start
    for process in started:
        process.end()


@pytest.fixture
def eventually():
    """Ask until the answer is true; fails with the last answer after a bounded time."""

    def ask(question, what):
        deadline = time.monotonic() + WAIT_SECONDS
        while not (answer := question()):
            assert time.monotonic() < deadline, f"never happened: {what}; last answer {answer!r}"
            time.sleep(0.02)
        return answer

    return ask


@pytest.fixture
def identity():
    return Identity(model_name="Org/Model", backend_framework=1, dtype="bfloat16")


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(clock):
    return MemoryStore(stale_seconds=90, remove_seconds=600, clock=clock)


@pytest.fixture
def server(store):
    with DirectoryServer("127.0.0.1:0", store) as running:
        yield running


@pytest.fixture
def client(server):
    with DirectoryClient(server.address, timeout=10) as connected:
        yield connected


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """No test sees the operator's settings or leaves an embedded directory behind."""
    for name in [name for name in os.environ if name.startswith("MX_")]:
        monkeypatch.delenv(name)
    yield
    stop_hosting()
