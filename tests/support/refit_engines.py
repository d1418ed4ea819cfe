"""Real trainers and a real engine, of any kind: after each version the engine generates what transformers generates from the trainer's
weights.

    from tests.support.refit_engines import place      # a fixture: starts processes around one directory
    check_version(engine, config, 1, "staged")

`engine`: a process that talks as `tests.support.vllm_engine` does.
"""

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

__all__ = [
    "MODEL",
    "PROMPTS",
    "SIZES",
    "STEPS",
    "check_version",
    "fsdp_trainer",
    "fsdp_trainers_of_each_kind",
    "megatron_of_any_layout",
    "model_of",
    "place",
    "tokens_of",
]

MODEL, STEPS = "toy/refit", 2
# longer than a block of the KV cache: what an engine kept of the old weights would show in the answers
PROMPTS = [[(7 * n + shift) % 250 for n in range(40)] for shift in (3, 11)]
SIZES = {"hidden": 128, "heads": 4, "groups": 2, "head_dim": 32, "ffn": 192}


def tokens_of(config, version, model=MODEL):
    """What transformers generates from the version as published, written down as a checkpoint."""
    with contextlib.closing(receive_full(model, version=version)) as tensors:
        state = {name: tensor.clone() for name, tensor in tensors}
    with tempfile.TemporaryDirectory() as folder:
        save_file(state, f"{folder}/model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        reference, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    out = []
    for prompt in PROMPTS:
        made = reference.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
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

        def start(*arguments, env=env, **how):
            process = Process(*arguments, env=env, **how)
            stack.callback(process.end)
            return process

        yield start


def check_version(engine, config, version, path, model=MODEL):
    engine.tell("refit " + json.dumps({"model_name": model, "version": version, "path": path}))
    assert engine.expect("refitted", 120) == f"{version} {version}"
    engine.tell("ask")
    assert json.loads(engine.expect("tokens", 120)) == tokens_of(config, version, model)


def model_of(described, folder):
    """(folder with the configuration alone, the configuration)"""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(described))
    return folder / "model", AutoConfig.for_model(**described)


def fsdp_trainer(place, described, model=MODEL, *, kind="plain", **how):
    """That publishes after each line `step`."""
    spec = {"config": described, "model": model, "kind": kind}
    return place("-W", "ignore", "-m", "tests.support.fsdp_steps", json.dumps(spec), **how)


def fsdp_trainers_of_each_kind(kinds, engine_of, place, folder, paths=("staged",)):
    """Into one engine, each trainer under a name of its own, on the paths in turn; shards are of unequal size."""
    described = case("llama", 1, layers=2, **SIZES)["hf"]
    described |= {"vocab_size": described["vocab_size"] + 3, "intermediate_size": 190}
    model, config = model_of(described, folder)
    engine = engine_of(place, model, 1)
    for kind in kinds:
        trainer = fsdp_trainer(place, described, f"{MODEL}/{kind}", kind=kind)
        for version in range(1, STEPS + 1):
            trainer.tell("step")
            trainer.expect("published", 120)
            check_version(engine, config, version, paths[version % len(paths)], f"{MODEL}/{kind}")
        trainer.end()


def megatron_of_any_layout(family, world, layout, tp, engine_of, place, folder, paths=("reshard",)):
    """Version by version, each weight changed, on the paths in turn."""
    told = {"family": family, "world": world, "layers": 2, **SIZES, **layout}
    model, config = model_of(case(**told)["hf"], folder)
    engine = engine_of(place, model, tp)
    spec = {"case": told, "model": MODEL, "versions": STEPS, "folder": str(folder)}
    trainer = place("-W", "ignore", "-m", "tests.support.megatron_versions", json.dumps(spec))
    for version in range(1, STEPS + 1):
        assert trainer.expect("published", 120) == str(version)
        check_version(engine, config, version, paths[version % len(paths)])
        (folder / f"seen{version}").touch()
