"""What the tests of pure functions share: an environment without the operator's settings, and the golden vectors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("MX_", "UCX_", "DYN_")):
            monkeypatch.delenv(name)
    # a node's own topology must not leak into the tests
    monkeypatch.setenv("DYN_TOPOLOGY_MOUNT_PATH", str(tmp_path / "no-topology"))


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_RESHARD_MIN_GBPS", "10")
    monkeypatch.setenv("MX_RESHARD_MAX_GBPS", "400")
    monkeypatch.setenv("MX_FLOOR_MIN_BYTES", "0")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `golden_KEY` runs once for every vector under KEY."""
    for name in metafunc.fixturenames:
        if name.startswith("golden_"):
            vectors: list[Any] = json.loads((TESTS / "golden" / "reference_vectors.json").read_text())[
                name.removeprefix("golden_")
            ]
            metafunc.parametrize(name, vectors, ids=[f"{i}" for i in range(len(vectors))])
