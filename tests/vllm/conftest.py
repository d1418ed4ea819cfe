"""Real vLLM engines on the CPU, each in a process of its own, around one directory."""

from __future__ import annotations

import json

import pytest

from mx_common.directory import DirectoryServer
from tests.support.process import Process
from tests.support.vllm_model import make_model

START_SECONDS = 180
MODEL = "tests/small-llama"


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """(folder with weights, folder without, expected tokens)"""
    return make_model(tmp_path_factory.mktemp("small-llama"))


@pytest.fixture
def fleet(tmp_path):
    """Starts engines and other processes that share a directory, and ends them."""
    with DirectoryServer("127.0.0.1:0") as server:
        made = Fleet(server.address, tmp_path)
        yield made
        made.end()


class Fleet:
    def __init__(self, address, folder):
        self.address, self.folder = address, folder
        self.environment = {
            "MX_SERVER_ADDRESS": address,
            "MX_MODEL_NAME": MODEL,
            "MX_HEARTBEAT_SECONDS": "0.5",
            "MX_RUNTIME_DIR": str(folder / "run"),
            "MX_RECORDS_FILE": str(folder / "records.jsonl"),
        }
        self.processes = []

    def start(self, module, spec, env=None):
        process = Process("-m", module, json.dumps(spec), env={**self.environment, **(env or {})})
        self.processes.append(process)
        return process

    def engine(self, model, env=None, **spec):
        return self.start("tests.support.vllm_engine", {"model": str(model), **spec}, env)

    def ready(self, count=1, seconds=60):
        """The READY sources, once there are `count`."""
        import time

        from mx_common.directory import DirectoryClient
        from mx_common.wire import p2p

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
