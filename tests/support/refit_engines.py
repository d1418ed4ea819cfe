"""Real trainers and a real engine, of any kind: after each version the engine generates what the trainer's weights give by the trainer's
own means, and transformers: of Megatron its own forward pass too, of FSDP a checkpoint that PyTorch gathers.

    from tests.support.refit_engines import place      # a fixture: starts processes around one directory
    check_version(engine, step(trainer, config, 1), 1, "staged")

`engine`: a process that talks as `tests.support.vllm_engine` does.
"""

from __future__ import annotations

import contextlib
import json
import tempfile

import pytest
import torch
from safetensors.torch import load_file, save_file
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
    "exported",
    "fsdp_trainer",
    "fsdp_trainers_of_each_kind",
    "generated",
    "megatron_of_any_layout",
    "megatron_version",
    "model_of",
    "place",
    "records",
    "step",
]

MODEL, STEPS = "toy/refit", 2
# longer than a block of the KV cache: what an engine kept of the old weights would show in the answers
PROMPTS = [[(7 * n + shift) % 250 for n in range(40)] for shift in (3, 11)]
SIZES = {"hidden": 128, "heads": 4, "groups": 2, "head_dim": 32, "ffn": 192}


def step(trainer, config, version, model=MODEL):
    """Has an FSDP trainer take a step. What transformers generates from the weights after it."""
    return generated(config, exported(trainer, version, model))


def exported(trainer, version, model=MODEL):
    """Has an FSDP trainer take a step. The checkpoint that PyTorch gathered after it; whoever receives the version as full tensors gets
    the same."""
    trainer.tell("step")
    assert trainer.expect("published", 120) == str(version)
    gathered = load_file(trainer.expect("exported", 120))
    received = full_tensors(version, model)
    assert received.keys() == gathered.keys()
    assert [name for name in gathered if not torch.equal(received[name], gathered[name])] == []
    return gathered


def full_tensors(version, model=MODEL):
    """The checkpoint that a version is."""
    with contextlib.closing(receive_full(model, version=version)) as tensors:
        return {name: tensor.clone() for name, tensor in tensors}


def generated(config, checkpoint):
    """What transformers generates from the files of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        save_file(checkpoint, f"{folder}/model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        reference, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    prompts, limits = torch.tensor(PROMPTS), {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    made = reference.eval().generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, **limits)
    return made[:, -NEW_TOKENS:].tolist()


def megatron_version(trainer, config, version):
    """Waits for a version of a Megatron trainer. What Megatron's own forward pass generates, and transformers from the version."""
    assert trainer.expect("published", 120) == str(version)
    expected = json.loads(trainer.expect("generates", 120))
    assert generated(config, full_tensors(version)) == expected
    return expected


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory, and the environment in which trainer and engine find it."""
    monkeypatch.setenv("MX_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("MX_RECORDS_FILE", str(tmp_path / "records-parent.jsonl"))
    with DirectoryServer("127.0.0.1:0") as server, contextlib.ExitStack() as stack:
        monkeypatch.setenv("MX_SERVER_ADDRESS", server.address)
        env = {"MX_SERVER_ADDRESS": server.address, "MX_RUNTIME_DIR": str(tmp_path / "run"), "TORCHDYNAMO_DISABLE": "1"}
        env["MX_RECORDS_FILE"] = str(tmp_path / "records-{pid}.jsonl")

        def start(*arguments, variables=None, **how):
            process = Process(*arguments, env=env | (variables or {}), **how)
            stack.callback(process.end)
            return process

        yield start


def check_version(engine, expected, version, path, model=MODEL, **settings):
    """The engine takes the version over, and generates what is expected, which is not what it generated before."""
    engine.tell("ask")
    before = json.loads(engine.expect("tokens", 120))
    engine.tell("refit " + json.dumps({"model_name": model, "version": version, "path": path, **settings}))
    assert engine.expect("refitted", 120) == f"{version} {version}"
    engine.tell("ask")
    said = json.loads(engine.expect("tokens", 120))
    assert said == expected
    assert said != before


def records(folder, schema="refit-throughput-v1"):
    """Those that engines and trainers of `place` have written."""
    found = [json.loads(line) for path in folder.glob("records-[0-9]*") for line in path.read_text().splitlines()]
    return [record for record in found if record["schema"] == schema]


def model_of(described, folder):
    """(folder with the configuration alone, the configuration)"""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(described))
    return folder / "model", AutoConfig.for_model(**described)


def fsdp_trainer(place, described, folder, model=MODEL, *, kind="plain", **how):
    """That publishes after each line `step`, and leaves a checkpoint in the folder."""
    spec = {"config": described, "model": model, "kind": kind, "folder": str(folder)}
    return place("-W", "ignore", "-m", "tests.support.fsdp_steps", json.dumps(spec), **how)


def fsdp_trainers_of_each_kind(kinds, engine_of, place, folder, paths=("staged",), **variables):
    """Into one engine, each trainer under a name of its own, on the paths in turn; shards are of unequal size."""
    described = case("llama", 1, layers=2, **SIZES)["hf"]
    described |= {"vocab_size": described["vocab_size"] + 3, "intermediate_size": 190, "initializer_range": 0.2}
    model, config = model_of(described, folder)
    engine = engine_of(place, model, 1, **variables)
    for kind in kinds:
        trainer = fsdp_trainer(place, described, folder, f"{MODEL}/{kind}", kind=kind)
        for version in range(1, STEPS + 1):
            expected = step(trainer, config, version, f"{MODEL}/{kind}")
            check_version(engine, expected, version, paths[version % len(paths)], f"{MODEL}/{kind}")
        trainer.end()


def megatron_of_any_layout(family, world, layout, tp, engine_of, place, folder, paths=("reshard",)):
    """Version by version, each weight changed, on the paths in turn."""
    told = {"family": family, "world": world, "layers": 2, **SIZES, **layout}
    model, config = model_of(case(**told)["hf"], folder)
    engine = engine_of(place, model, tp)
    spec = {"case": told, "model": MODEL, "versions": STEPS, "folder": str(folder), "prompts": PROMPTS, "tokens": NEW_TOKENS}
    trainer = place("-W", "ignore", "-m", "tests.support.megatron_versions", json.dumps(spec))
    for version in range(1, STEPS + 1):
        expected = megatron_version(trainer, config, version)
        check_version(engine, expected, version, paths[version % len(paths)])
        (folder / f"seen{version}").touch()
