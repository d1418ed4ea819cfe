"""Real trainers, a real vLLM: after each version the engine generates what transformers generates from the trainer's weights."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mx_common.directory import DirectoryServer
from mx_common.refit import receive_full
from tests.megatron.cases import case
from tests.support.process import Process
from tests.support.vllm_model import NEW_TOKENS, PROMPTS

pytestmark = pytest.mark.engine

MODEL, STEPS = "toy/refit", 2
SIZES = {"hidden": 128, "heads": 4, "groups": 2, "head_dim": 32, "ffn": 192}


def tokens_of(config, version):
    """What transformers generates from the version as published."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = model.state_dict()
    with contextlib.closing(receive_full(MODEL, version=version)) as tensors, torch.no_grad():
        for name, tensor in tensors:
            state[name].copy_(tensor)
    out = []
    for prompt in PROMPTS:
        prompt = [token % config.vocab_size for token in prompt]
        made = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
        out.append(made[0, len(prompt) :].tolist())
    return out


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory, and the environment in which trainer and engine find it."""
    monkeypatch.setenv("MX_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("MX_RECORDS_FILE", str(tmp_path / "records-parent.jsonl"))
    with DirectoryServer("127.0.0.1:0") as server, contextlib.ExitStack() as stack:
        monkeypatch.setenv("MX_SERVER_ADDRESS", server.address)
        env = {"MX_SERVER_ADDRESS": server.address, "MX_RUNTIME_DIR": str(tmp_path / "run"), "TORCHDYNAMO_DISABLE": "1"}
        env["MX_RECORDS_FILE"] = str(tmp_path / "records-{pid}.jsonl")

        def start(*arguments):
            process = Process(*arguments, env=env)
            stack.callback(process.end)
            return process

        yield start


def engine_of(start, folder, tp):
    spec = {
        "model": str(folder),
        "tp": tp,
        "load_format": "dummy",
        "max_model_len": 64,
        "options": {"weight_transfer_config": {"backend": "mx"}},
    }
    engine = start("-m", "tests.support.vllm_engine", json.dumps(spec))
    engine.expect("tokens", 240)
    return engine


def check_version(engine, config, version, path):
    engine.tell("refit " + json.dumps({"model_name": MODEL, "version": version, "path": path}))
    assert engine.expect("refitted", 120) == f"{version} {version}"
    engine.tell("ask")
    assert json.loads(engine.expect("tokens", 120)) == tokens_of(config, version)


@pytest.mark.parametrize(("family", "tp", "tied"), [("llama", 1, True), ("llama", 2, False), ("qwen3", 1, False)])
def test_a_tensor_parallel_megatron_trainer_is_followed_version_by_version(family, tp, tied, place, tmp_path):
    run = {"via": "served", "world": 2, "tp": 2, "overlap": False, "replicas": False, "steps": STEPS, "model": MODEL}
    run |= {"tied": tied, "family": family, "sizes": SIZES}
    (tmp_path / "runs.json").write_text(json.dumps([run]))
    described = case(family, 1, layers=2, tied=tied, **SIZES)["hf"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(described))
    config = AutoConfig.for_model(**described)
    engine = engine_of(place, tmp_path / "model", tp)
    trainer = place("-W", "ignore", "-m", "tests.megatron.trainer_child", tmp_path / "runs.json", tmp_path / "out")
    for version in range(STEPS + 1):
        assert trainer.expect("published", 120) == str(version)
        check_version(engine, config, version, "reshard")
        (tmp_path / "out" / "0" / f"seen{version}").touch()


def test_an_fsdp_trainer_is_followed_version_by_version(place, tmp_path):
    described = case("llama", 1, layers=2, **SIZES)["hf"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(described))
    config = AutoConfig.for_model(**described)
    engine = engine_of(place, tmp_path / "model", 1)
    trainer = place("-W", "ignore", "-m", "tests.support.fsdp_steps", json.dumps({"config": described, "model": MODEL}))
    for version in range(1, STEPS + 2):
        trainer.tell("step")
        trainer.expect("published", 120)
        check_version(engine, config, version, "staged")


def test_a_rank_that_cannot_prepare_a_version_keeps_all_ranks_at_the_old_one(place, tmp_path):
    described = case("llama", 1, layers=2, **SIZES)["hf"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(described))
    engine = engine_of(place, tmp_path / "model", 2)
    trainer = place("-W", "ignore", "-m", "tests.support.fsdp_steps", json.dumps({"config": described, "model": MODEL}))
    trainer.tell("step")
    trainer.expect("published", 120)
    check_version(engine, AutoConfig.for_model(**described), 1, "reshard")
    engine.tell("refit " + json.dumps({"model_name": MODEL, "version": 9, "timeout": 0.5}))
    assert "no version 9 of toy/refit" in engine.expect("failed", 60)
    trainer.tell("step")
    trainer.expect("published", 120)
    engine.tell("ask")
    before = engine.expect("tokens", 120)
    engine.tell("update " + json.dumps([{"version": 2}, {"version": 9, "timeout": 0.5}]))
    assert "rank 1: version 9 of toy/refit was not installed" in engine.expect("failed", 120)
    engine.tell("ask")
    assert engine.expect("tokens", 120) == before
    check_version(engine, AutoConfig.for_model(**described), 2, "reshard")
