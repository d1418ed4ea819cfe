"""The real `modelexpress` and this pack in one process: both import orders, protobuf 6 and 7, both sides of both services."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEER = Path(__file__).with_name("modelexpress_peer.py")


@pytest.fixture(scope="session")
def overlays():
    """The folders for PYTHONPATH, by protobuf major version; made on first use, which needs the package registry."""
    command = [sys.executable, str(ROOT / "scripts/compat_env.py")]
    made = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, f"`python scripts/compat_env.py` could not install the packages to test with:\n{made.stderr}"
    modelexpress, protobuf_6 = made.stdout.split()
    return {7: [modelexpress], 6: [protobuf_6, modelexpress]}


@pytest.mark.parametrize("protobuf_major", [6, 7])
@pytest.mark.parametrize("order", ["ours-first", "theirs-first"])
def test_modelexpress_and_this_pack_understand_each_other_in_one_process(overlays, protobuf_major, order):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MX_", "MODEL_EXPRESS_"))}
    environment["PYTHONPATH"] = os.pathsep.join([*overlays[protobuf_major], str(ROOT)])
    run = subprocess.run(
        [sys.executable, str(PEER), order], env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout.splitlines()[-1])
    assert seen.pop("protobuf").split(".")[0] == str(protobuf_major)
    assert seen == {
        "same_class": False,
        "same_source_id": True,
        "ours_reads_theirs": [1 << 40, "agent", 3],
        "measured_zero_load": [True, 0.0],
        "theirs_lists": ["our-worker", "their-worker"],
        "theirs_reads_ours": 1,
        "our_reader_their_source": ["w"],
        "renewal_with_their_source_is_a_new_lease": True,
        "their_reader_our_source": [["w"], 1],
        "open_after_their_release": 0,
    }
