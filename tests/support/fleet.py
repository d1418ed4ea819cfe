"""Real engines on the CPU, each in a process of its own, around one directory: what the tests of every engine share.

    from tests.support.fleet import Fleet, small_model    # a fixture
    with Fleet.started(folder, "tests.support.vllm_engine") as fleet:
        source = fleet.engine(model)

Invariant: whatever was started is ended with the block.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager

import pytest

from mx_common.directory import DirectoryClient, DirectoryServer
from mx_common.wire import p2p
from tests.support.process import Process
from tests.support.vllm_model import make_model

__all__ = ["MODEL", "START_SECONDS", "Fleet", "small_model"]

START_SECONDS = 180
MODEL = "tests/small-llama"


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """(folder with weights, folder without, expected tokens)"""
    return make_model(tmp_path_factory.mktemp("small-llama"))


class Fleet:
    """Engines, and other processes, that find the directory at `address`. `module` is the engine's program: see `vllm_engine`."""

    def __init__(self, address, folder, module, **how):
        self.address, self.folder, self.module, self.how = address, folder, module, how
        self.environment = {
            "MX_SERVER_ADDRESS": address,
            "MX_MODEL_NAME": MODEL,
            "MX_HEARTBEAT_SECONDS": "0.5",
            "MX_RUNTIME_DIR": str(folder / "run"),
            "MX_RECORDS_FILE": str(folder / "records.jsonl"),
        }
        self.processes = []

    @classmethod
    @contextmanager
    def started(cls, *arguments, **how):
        """With a directory of its own; ends everything."""
        with DirectoryServer("127.0.0.1:0") as server:
            made = cls(server.address, *arguments, **how)
            try:
                yield made
            finally:
                made.end()

    def start(self, module, spec, env=None, **how):
        return self.keep(Process("-m", module, json.dumps(spec), env={**self.environment, **(env or {})}, **how))

    def keep(self, process):
        """To be ended with the others."""
        self.processes.append(process)
        return process

    def engine(self, model, env=None, **spec):
        return self.start(self.module, {"model": str(model), **spec}, env, **self.how)

    def ready(self, count=1, seconds=60):
        """The READY sources, once there are `count`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with DirectoryClient(self.address) as client:
                found = client.list_sources(status=p2p.SOURCE_STATUS_READY).instances
            if len(found) >= count:
                return found
            time.sleep(0.2)
        raise AssertionError(f"{len(found)} READY sources after {seconds} s, not {count}")

    def records(self):
        return [json.loads(line) for path in sorted(self.folder.glob("records*")) for line in path.read_text().splitlines()]

    def end(self):
        for process in self.processes:
            process.end()
