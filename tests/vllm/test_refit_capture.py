"""Real vLLM models on the CPU take over other weights: what their loaders do is captured, and pieces and whole tensors are installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DERIVED = ("cos_sin_cache", "._k_scale", "._v_scale", "._q_scale", "._prob_scale")
_said = {}


@pytest.fixture
def said(request, tmp_path_factory):
    """What one engine of this kind said; each is started once."""
    kind, packed = request.param
    if request.param not in _said:
        spec = {"kind": kind, "packed": packed, "folder": str(tmp_path_factory.mktemp("refit"))}
        command = [sys.executable, "-m", "tests.vllm.refit_capture_child", json.dumps(spec)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("said ")]
        assert lines, done.stdout[-2000:] + done.stderr[-4000:]
        _said[request.param] = json.loads(lines[-1].removeprefix("said "))
    return _said[request.param]


OPEN = [("llama", False), ("tied llama", False), ("qwen2", False), ("qwen3", False), ("qwen3 moe", False)]
PACKED = [("tied llama", True), ("qwen3 moe", True)]
every = pytest.mark.parametrize("said", OPEN + PACKED, indirect=True, ids=lambda p: f"{p[0]}{', packed' if p[1] else ''}")
unpacked = pytest.mark.parametrize("said", OPEN, indirect=True, ids=lambda p: p[0])
packed = pytest.mark.parametrize("said", PACKED, indirect=True, ids=lambda p: p[0])


@every
def test_every_byte_that_a_checkpoint_fills_is_covered(said):
    assert [name for name in said["uncovered"] if not name.endswith(DERIVED)] == []
    assert not said["unused"]
    assert not said["failed"]


@every
def test_a_capture_leaves_the_live_model_as_it_was(said):
    assert said["untouched"]


@every
def test_pieces_and_whole_tensors_make_the_engine_answer_as_one_started_with_the_new_weights(said):
    assert said["before"] != said["expected"]
    assert said["after"] == said["again"] == said["expected"]
    assert said["addresses kept"]


@every
def test_full_tensors_through_the_loader_do_so_too(said):
    assert said["scrambled"] != said["expected"]
    assert said["loaded in full"] == said["expected"]


@every
def test_a_load_that_fails_leaves_the_live_tensors_in_place(said):
    assert "refused" in said
    assert said["whole after a failure"]
    assert said["after a failure"] == said["expected"]


@unpacked
def test_unpacked_layers_are_pieces_except_the_experts_that_the_cpu_kernel_repacks(said):
    assert [name for name in said["whole"] if ".experts." not in name] == []
    assert any(name.endswith("qkv_proj.weight") for name in said["params"])
    assert said["part"] == len([name for name in said["pieces"] if ".q_proj." in name])


@unpacked
def test_padding_of_the_embedding_is_no_piece(said):
    assert said["constant"]["model.embed_tokens.weight"] == (320 - 300) * 128 * 4


@packed
def test_packed_layers_are_loaded_whole_and_refuse_a_part(said):
    assert any("qkv" in name or "q_proj" in name for name in said["whole"])
    assert all(name.endswith(("norm.weight", "bias")) for name in said["pieces"])
    assert "CoverageError" in said["part"]
