"""The README's first command does what it says, on the real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.demo import check_the_demo

ROOT = Path(__file__).parent.parent


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_demo_shows_a_replica_loading_out_of_another_ones_memory():
    check_the_demo(sys.executable, "vllm")


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_refit_demo_brings_every_version_of_both_trainers_into_a_running_server():
    done = subprocess.run([sys.executable, "-m", "examples.refit"], cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("MX_DEMO_REFIT ")
    facts = json.loads(last.removeprefix("MX_DEMO_REFIT "))
    assert {name: fact["path"] for name, fact in facts.items()} == {"fsdp": "staged", "megatron": "reshard"}
    for name, fact in facts.items():
        assert [version["version"] for version in fact["versions"]] == [1, 2, 3]
        assert {version["verdict"] for version in fact["versions"]} == {"ok"}
        assert all(
            version["verified"] and version["wire_bytes"] >= version["minimum_bytes"] > 0 for version in fact["versions"]
        )
        assert all({"wait", "plan", "wire", "verify", "install"} <= version["stages_s"].keys() for version in fact["versions"])
        assert fact["answers"][1] != fact["answers"][-1]
        assert fact["reported_version"] == "3"
        assert {version["framework"] for version in fact["versions"]} == {name}
        assert (fact["answered_meanwhile"] > 0, fact["failed_meanwhile"]) == (True, 0)
    assert "Paris" in facts["fsdp"]["answers"][0]
    assert "Atlantis" in facts["fsdp"]["answers"][-1]
