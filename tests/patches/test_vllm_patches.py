"""The patches on the real vLLM. One process has it, since importing it takes many seconds; `mx doctor` is another."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process import Process

CHILD = Path(__file__).with_name("vllm_child.py")
START_SECONDS = 180


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def child(runtime):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = Process(CHILD, port, env={"MX_RUNTIME_DIR": str(runtime)})
    yield process
    process.end()


@pytest.fixture(scope="module")
def facts(child):
    return json.loads(child.expect("facts ", START_SECONDS))


def test_without_the_patch_vllm_hides_a_linear_weight(facts):
    assert facts["plain"]["readable"] is False


def test_with_it_the_weight_is_readable_and_what_is_written_to_it_is_served(facts):
    assert facts["patched"]["readable"] is True
    assert facts["patched"]["writable"] is True


def test_the_layer_computes_the_same_with_and_without_it(facts):
    pairs = zip(facts["plain"]["output"], facts["patched"]["output"], strict=True)
    assert all(abs(a - b) <= 0.02 * max(abs(a), 1) for a, b in pairs)


def test_applying_it_twice_is_applying_it_once(facts):
    assert facts["applied"] == ["applied", "applied"]
    assert facts["switches"] == [False, False]
    assert [level for level, text in facts["applied_said"] if "vllm-keep-weights applied" in text] == ["INFO"]


def test_a_precondition_that_does_not_hold_skips_it_with_one_warning(facts):
    assert facts["obstacle"]["states"] == ["skipped"] * 3
    assert facts["obstacle"]["said"] == [
        ["WARNING", "patch vllm-keep-weights skipped: vllm._custom_ops has no _supports_onednn"]
    ]


def test_warming_up_is_told_once_a_worker_and_its_result_and_errors_pass_through(facts):
    assert facts["warm_up"]["results"] == ["times", ["times"], "out of memory"]
    assert facts["warm_up"]["heard"] == ["Worker", "Extended"]


@pytest.fixture(scope="module")
def doctor(facts, runtime):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MX_")}
    done = subprocess.run(
        [Path(sys.executable).parent / "mx", "doctor", "--json", "--patience", str(START_SECONDS)],
        env={**clean, "MX_RUNTIME_DIR": str(runtime), "MX_EMBEDDED_ADDRESS": "127.0.0.1:1"},
        capture_output=True,
        timeout=2 * START_SECONDS,
        check=True,
    )
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_doctor_lists_what_a_running_process_applied(doctor, child):
    found = doctor[f"process {child.popen.pid}"]
    assert found["detail"] == "patches: vllm-keep-weights applied, vllm-warm-up-signal applied"


def test_doctor_says_what_would_be_applied_here_and_why(doctor):
    for name in ("vllm-keep-weights", "vllm-warm-up-signal"):
        assert doctor[f"patch {name}"]["state"] == "ok"
        assert "vllm >=0.32,<0.33: would be applied (" in doctor[f"patch {name}"]["detail"]
