"""A directory on loopback and toy sources in processes of their own."""

from __future__ import annotations

import json

import pytest

from tests.support.process import Process
from tests.support.scrape import page  # noqa: F401  a fixture


@pytest.fixture(autouse=True)
def _own_corner(monkeypatch, tmp_path):
    """Nothing of the machine's own settings, files or ports is used."""
    monkeypatch.setenv("MX_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("MX_RECORDS_FILE", str(tmp_path / "records.jsonl"))
    monkeypatch.setenv("MX_RPC_TIMEOUT", "3")
    monkeypatch.setenv("MX_HEARTBEAT_SECONDS", "0.3")


@pytest.fixture
def start_source(directory, tmp_path):
    """Starts a toy source and waits until it is listed (or registered, when it is never to be ready)."""
    children = []

    def start(worker_id, seed=1, *, env=None, **spec):
        spec = {"worker_id": worker_id, "seed": seed, "server": directory.address, **spec}
        child = Process(
            "-m",
            "tests.support.toy_source",
            json.dumps(spec),
            env={"MX_RUNTIME_DIR": str(tmp_path / "run"), "MX_HEARTBEAT_SECONDS": "0.3", **(env or {})},
        )
        children.append(child)
        child.expect("ready" if spec.get("ready", True) else "registered")
        return child

    yield start
    for child in children:
        child.end()
