"""Runs the demo of an engine as the README says, and checks what it claims."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def check_the_demo(python, engine):
    """`python` is that of the engine's environment. Raises AssertionError with the end of the output."""
    command = [str(python), "-m", "examples.first_light", "--engine", engine]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("MX_DEMO ")
    facts = json.loads(last.removeprefix("MX_DEMO "))
    assert facts["engine"] == engine
    assert facts["answers_equal"] is True
    assert "Paris" in facts["answer"]
    assert facts["target_had_weight_files"] is False
    assert facts["wire_bytes"] > 269_000_000
    assert facts["wire_s"] > 0
    assert facts["implied_gbps"] > 0
    assert facts["policy"] == "balanced"
    assert facts["source_worker_id"] == facts["replica_1_worker_id"]
    assert facts["third_target_takes"] == facts["replica_2_worker_id"]
    assert facts["fallback"] is False
    assert facts["storage_load_s"] > 0
    assert facts["peer_load_s"] > 0
