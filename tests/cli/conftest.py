"""The installed `mx` command, real directories on loopback, and sources registered in them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from mx_common.directory import DirectoryClient, DirectoryServer, MemoryStore
from mx_common.identity import Identity
from mx_common.wire import p2p

MX = Path(sys.executable).parent / "mx"
WAIT_SECONDS = 60


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


class Running:
    """An `mx` command that goes on; its lines are read in a thread."""

    def __init__(self, popen):
        self.popen = popen
        self.lines = []
        self._ended = False
        self._more = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.popen.stdout:
            with self._more:
                self.lines.append(line.rstrip("\n"))
                self._more.notify_all()
        with self._more:
            self._ended = True
            self._more.notify_all()

    def wait_for(self, text, after=0):
        """The number of the first line from number `after` on that holds `text`."""
        deadline = time.monotonic() + WAIT_SECONDS
        with self._more:
            while True:
                for number in range(after, len(self.lines)):
                    if text in self.lines[number]:
                        return number
                assert not self._ended, f"it ended before {text!r}: {self.lines}"
                assert self._more.wait(deadline - time.monotonic()), f"never said {text!r}: {self.lines[-20:]}"

    def end(self, number=signal.SIGINT):
        self.popen.send_signal(number)
        return self.popen.wait(WAIT_SECONDS)


@pytest.fixture
def environment(tmp_path):
    """The tests' own environment, without settings of the operator."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MX_")}
    for name in ("COLUMNS", "UCX_TLS", "DYN_TOPOLOGY_MOUNT_PATH", "PYTHONPATH"):
        clean.pop(name, None)
    return {**clean, "MX_RUNTIME_DIR": str(tmp_path / "run"), "MX_EMBEDDED_ADDRESS": "127.0.0.1:1"}


@pytest.fixture
def mx(environment):
    """Run one command to its end: `mx("sources", "--json", MX_RPC_TIMEOUT="1")`."""

    def run(*arguments, **variables):
        done = subprocess.run(
            [MX, *arguments],
            env={**environment, **variables},
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=WAIT_SECONDS,
            check=False,
        )
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


@pytest.fixture
def start_mx(environment):
    """Start a command that goes on; it is ended with the test."""
    started = []

    def start(*arguments, **variables):
        popen = subprocess.Popen(
            [MX, *arguments],
            env={**environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(popen)
        return Running(popen)

    yield start
    for popen in started:
        if popen.poll() is None:
            popen.kill()
        popen.wait(WAIT_SECONDS)


@pytest.fixture
def serve():
    """Start directories; `ahead`: seconds their wall clock is before this machine's."""
    started = []

    def start(address="127.0.0.1:0", *, ahead=0.0, clock=time.monotonic):
        store = MemoryStore(stale_seconds=90, remove_seconds=600, clock=clock, wall=lambda: time.time() + ahead)
        started.append(DirectoryServer(address, store).start())
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def directory(serve):
    return serve()


@pytest.fixture
def register():
    """Publish a source and give it one heartbeat; returns its source id."""

    def publish(address, worker_id, *, rank=0, load=None, status=p2p.SOURCE_STATUS_READY, identity=None, **worker):
        described = {
            "model_name": "Org/Model",
            "backend_framework": 1,
            "backend_framework_version": "0.32.0",
            "dtype": "bfloat16",
        }
        with DirectoryClient(address, timeout=10) as client:
            source_id = client.publish(
                Identity(**{**described, **(identity or {})}), p2p.WorkerMetadata(worker_rank=rank, **worker), worker_id
            )
            assert client.update_status(source_id, worker_id, rank, status, load)
        return source_id

    return publish


@pytest.fixture
def blocked(tmp_path):
    """A PYTHONPATH under which importing the named packages fails, as if they were not installed."""

    def block(*names):
        folder = tmp_path / f"without-{'-'.join(names)}"
        for name in names:
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "__init__.py").write_text(
                f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')\n"
            )
        return str(folder)

    return block


@pytest.fixture
def mx_path():
    return MX
