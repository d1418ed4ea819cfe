"""Real trainers, a real vLLM: after each version the engine generates what transformers and the trainer itself make of its weights."""

from __future__ import annotations

import json
from fnmatch import fnmatch

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.megatron.cases import case
from tests.support.refit_engines import (
    MODEL,
    PROMPTS,
    SIZES,
    STEPS,
    check_version,
    exported,
    fsdp_trainer,
    fsdp_trainers_of_each_kind,
    generated,
    megatron_of_any_layout,
    megatron_version,
    model_of,
    place,
    records,
    step,
)
from tests.support.vllm_model import NEW_TOKENS

__all__ = ["place"]

pytestmark = pytest.mark.engine


def engine_of(start, folder, tp, load_format="dummy", **variables):
    options = {"weight_transfer_config": {"backend": "mx"}, "block_size": 32, "enable_prefix_caching": True}
    spec = {
        "model": str(folder),
        "tp": tp,
        "load_format": load_format,
        "max_model_len": 64,
        "prompts": PROMPTS,
        "options": options,
    }
    engine = start("-m", "tests.support.vllm_engine", json.dumps(spec), variables=variables)
    engine.expect("tokens", 240)
    return engine


@pytest.mark.parametrize(("family", "tp", "tied"), [("llama", 1, True), ("llama", 2, False), ("qwen3", 1, False)])
def test_a_tensor_parallel_megatron_trainer_is_followed_version_by_version(family, tp, tied, place, tmp_path):
    run = {"via": "served", "world": 2, "tp": 2, "overlap": False, "replicas": False, "steps": STEPS, "model": MODEL}
    run |= {"tied": tied, "family": family, "sizes": SIZES, "prompts": PROMPTS, "tokens": NEW_TOKENS}
    (tmp_path / "runs.json").write_text(json.dumps([run]))
    described = case(family, 1, layers=2, tied=tied, **SIZES)["hf"]
    model, config = model_of(described, tmp_path)
    engine = engine_of(place, model, tp)
    trainer = place("-W", "ignore", "-m", "tests.megatron.trainer_child", tmp_path / "runs.json", tmp_path / "out")
    for version in range(STEPS + 1):
        check_version(engine, megatron_version(trainer, config, version), version, "reshard")
        (tmp_path / "out" / "0" / f"seen{version}").touch()


EXPERTS = {"experts": 4, "moe_ffn": 96}


@pytest.mark.parametrize(
    ("family", "world", "layout", "tp"),
    [
        ("llama", 2, {"pp": 2, "vpp": 2, "layers": 4, "tied": True}, 1),
        ("qwen3_moe", 2, {"ep": 2, **EXPERTS}, 1),
        ("qwen3_moe", 4, {"tp": 2, "ep": 2, "grouped": "legacy", **EXPERTS}, 2),
    ],
    ids=["pp2 with two virtual stages each to tp1", "ep2 to tp1", "tp2 x ep2 with experts in one transposed tensor to tp2"],
)
def test_a_megatron_model_in_another_parallel_layout_is_followed_version_by_version(family, world, layout, tp, place, tmp_path):
    megatron_of_any_layout(family, world, layout, tp, engine_of, place, tmp_path)


def test_each_rank_reads_its_own_share_where_it_lies_when_trainer_and_engine_are_cut_alike(place, tmp_path):
    def with_weights(place, model, tp):
        reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
        reference.save_pretrained(model)  # vLLM on CPU keeps layers as they are loaded with the load format mx only
        sizes.update((name, tensor.nbytes) for name, tensor in reference.state_dict().items())
        return engine_of(place, model, tp, load_format="mx")

    sizes = {}
    megatron_of_any_layout("qwen2", 2, {"tp": 2}, 2, with_weights, place, tmp_path)
    whole, norms = sum(sizes.values()), sum(nbytes for name, nbytes in sizes.items() if "norm" in name)
    for version in range(1, STEPS + 1):
        ranks = [record for record in records(tmp_path) if record["version"] == version]
        assert sorted(record["rank"] for record in ranks) == [0, 1]
        assert all(record["wire_bytes"] == record["minimum_bytes"] == record["choice"]["exact"] for record in ranks)
        assert all(0.45 * whole < record["wire_bytes"] < 0.55 * whole for record in ranks)
        assert sum(record["wire_bytes"] for record in ranks) == whole + norms


def test_fsdp_trainers_are_followed_version_by_version(place, tmp_path):
    fsdp_trainers_of_each_kind(("plain", "mixed"), engine_of, place, tmp_path)


def test_fsdp_trainers_are_followed_version_by_version_in_several_rounds(place, tmp_path):
    staging = 1 << 20
    fsdp_trainers_of_each_kind(("offload", "hsdp"), engine_of, place, tmp_path, MX_STAGING_BYTES=str(staging))
    read = [record["wire_bytes"] for record in records(tmp_path) if record["path"] == "staged"]
    assert len(read) == 2 * STEPS
    assert min(read) > 2 * (staging // 2), "three rounds or more"


def test_a_partial_refit_leaves_the_other_weights_as_they_serve(place, tmp_path):
    described = case("llama", 1, layers=2, **SIZES)["hf"] | {"initializer_range": 0.2}
    model, config = model_of(described, tmp_path)
    engine = engine_of(place, model, 1)
    trainer = fsdp_trainer(place, described, tmp_path)
    weights = exported(trainer, 1)
    check_version(engine, generated(config, weights), 1, "reshard")
    for version, path, only in ((2, "reshard", "*.mlp.*"), (3, "staged", "model.layers.1.*")):
        wanted = {name: tensor for name, tensor in exported(trainer, version).items() if fnmatch(name, only)}
        assert 0 < len(wanted) < len(weights)
        weights |= wanted
        check_version(engine, generated(config, weights), version, path, only=[only])
    (read,) = [record["wire_bytes"] for record in records(tmp_path) if (record["version"], record["path"]) == (3, "staged")]
    assert read == sum(tensor.nbytes for tensor in wanted.values())
    check_version(engine, step(trainer, config, 4), 4, "reshard")


def test_a_rank_that_cannot_prepare_a_version_keeps_all_ranks_at_the_old_one(place, tmp_path):
    described = case("llama", 1, layers=2, **SIZES)["hf"] | {"initializer_range": 0.2}
    model, config = model_of(described, tmp_path)
    engine = engine_of(place, model, 2)
    trainer = fsdp_trainer(place, described, tmp_path)
    check_version(engine, step(trainer, config, 1), 1, "reshard")
    engine.tell("refit " + json.dumps({"model_name": MODEL, "version": 9, "timeout": 0.5}))
    assert "no version 9 of toy/refit" in engine.expect("failed", 60)
    expected = step(trainer, config, 2)
    engine.tell("ask")
    before = engine.expect("tokens", 120)
    engine.tell("update " + json.dumps([{"version": 2}, {"version": 9, "timeout": 0.5}]))
    assert "rank 1: version 9 of toy/refit was not installed" in engine.expect("failed", 120)
    engine.tell("ask")
    assert engine.expect("tokens", 120) == before
    check_version(engine, expected, 2, "reshard")
