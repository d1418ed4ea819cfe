"""Servers on loopback and processes of their own for the directory's tests; everything that a test starts ends with it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mx_common.directory import DirectoryClient, DirectoryServer, MemoryStore
from mx_common.directory.embedded import stop_hosting
from mx_common.identity import Identity

CHILD = Path(__file__).with_name("directory_child.py")
WAIT_SECONDS = 30


class Process:
    """A child running one role of `directory_child.py`; its lines are read in a thread."""

    def __init__(self, role, *arguments, env=None):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MX_")}
        self.popen = subprocess.Popen(
            [sys.executable, "-u", str(CHILD), role, *map(str, arguments)],
            env={**environment, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,
            text=True,
        )
        self.lines = []
        self._queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.popen.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def expect(self, start):
        """The rest of the next line that begins with `start`."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            line = self._queue.get(timeout=max(deadline - time.monotonic(), 0.01))
            assert line is not None, f"{self.popen.args} ended before {start!r}: {self.lines}"
            self.lines.append(line)
            if line.startswith(start):
                return line.removeprefix(start).strip()

    def rest(self):
        """Every line until the process has ended, those already seen included."""
        self.popen.wait(WAIT_SECONDS)
        while (line := self._queue.get(timeout=WAIT_SECONDS)) is not None:
            self.lines.append(line)
        return self.lines

    def say(self, line):
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def kill(self, number=signal.SIGKILL):
        self.popen.send_signal(number)
        return self.popen.wait(WAIT_SECONDS)

    def close(self):
        if self.popen.poll() is None:
            # a stopped process ignores everything but this
            self.popen.kill()
            self.popen.wait(WAIT_SECONDS)
        self.popen.stdin.close()


@pytest.fixture
def spawn():
    started = []

    def start(role, *arguments, env=None):
        process = Process(role, *arguments, env=env)
        started.append(process)
        return process

    yield start
    for process in started:
        process.close()


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
def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
