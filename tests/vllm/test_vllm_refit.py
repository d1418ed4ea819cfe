"""Real trainers, a real vLLM: after each version the engine generates what transformers generates from the trainer's weights."""

from __future__ import annotations

import contextlib
import json
import tempfile

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from mx_common.directory import DirectoryServer
from mx_common.refit import receive_full
from tests.megatron.cases import case
from tests.support.process import Process
from tests.support.vllm_model import NEW_TOKENS

pytestmark = pytest.mark.engine

MODEL, STEPS = "toy/refit", 2
# longer than a block of the KV cache: what an engine kept of the old weights would show in the answers
PROMPTS = [[(7 * n + shift) % 250 for n in range(40)] for shift in (3, 11)]
SIZES = {"hidden": 128, "heads": 4, "groups": 2, "head_dim": 32, "ffn": 192}


def tokens_of(config, version):
    """What transformers generates from the version as published, written down as a checkpoint."""
    with contextlib.closing(receive_full(MODEL, version=version)) as tensors:
        state = {name: tensor.clone() for name, tensor in tensors}
    with tempfile.TemporaryDirectory() as folder:
        save_file(state, f"{folder}/model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    out = []
    for prompt in PROMPTS:
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
    options = {"weight_transfer_config": {"backend": "mx"}, "block_size": 32, "enable_prefix_caching": True}
    spec = {"model": str(folder), "tp": tp, "load_format": "dummy", "max_model_len": 64, "prompts": PROMPTS, "options": options}
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


EXPERTS = {"experts": 4, "moe_ffn": 96}


@pytest.mark.parametrize(
    ("family", "world", "layout", "tp"),
    [
        ("llama", 2, {"pp": 2, "tied": True}, 1),
        ("qwen2", 2, {"tp": 2}, 2),
        ("qwen3_moe", 2, {"ep": 2, **EXPERTS}, 1),
        ("qwen3_moe", 4, {"tp": 2, "ep": 2, **EXPERTS}, 2),
    ],
    ids=["pp2 to tp1", "tp2 with qkv bias to tp2", "ep2 to tp1", "tp2 x ep2 to tp2"],
)
def test_a_megatron_model_in_another_parallel_layout_is_followed_version_by_version(family, world, layout, tp, place, tmp_path):
    told = {"family": family, "world": world, "layers": 2, **SIZES, **layout}
    described = case(**told)["hf"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(described))
    engine = engine_of(place, tmp_path / "model", tp)
    spec = {"case": told, "model": MODEL, "versions": STEPS, "folder": str(tmp_path)}
    trainer = place("-W", "ignore", "-m", "tests.support.megatron_versions", json.dumps(spec))
    for version in range(1, STEPS + 1):
        assert trainer.expect("published", 120) == str(version)
        check_version(engine, AutoConfig.for_model(**described), version, "reshard")
        (tmp_path / f"seen{version}").touch()


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
