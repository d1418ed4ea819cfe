"""Real trainers, a real vLLM: after each version the engine generates what transformers generates from the trainer's weights."""

from __future__ import annotations

import json

import pytest

from tests.megatron.cases import case
from tests.support.refit_engines import (
    MODEL,
    PROMPTS,
    SIZES,
    STEPS,
    check_version,
    fsdp_trainer,
    fsdp_trainers_of_each_kind,
    megatron_of_any_layout,
    model_of,
    place,
)

__all__ = ["place"]

pytestmark = pytest.mark.engine


def engine_of(start, folder, tp):
    options = {"weight_transfer_config": {"backend": "mx"}, "block_size": 32, "enable_prefix_caching": True}
    spec = {"model": str(folder), "tp": tp, "load_format": "dummy", "max_model_len": 64, "prompts": PROMPTS, "options": options}
    engine = start("-m", "tests.support.vllm_engine", json.dumps(spec))
    engine.expect("tokens", 240)
    return engine


@pytest.mark.parametrize(("family", "tp", "tied"), [("llama", 1, True), ("llama", 2, False), ("qwen3", 1, False)])
def test_a_tensor_parallel_megatron_trainer_is_followed_version_by_version(family, tp, tied, place, tmp_path):
    run = {"via": "served", "world": 2, "tp": 2, "overlap": False, "replicas": False, "steps": STEPS, "model": MODEL}
    run |= {"tied": tied, "family": family, "sizes": SIZES}
    (tmp_path / "runs.json").write_text(json.dumps([run]))
    described = case(family, 1, layers=2, tied=tied, **SIZES)["hf"]
    model, config = model_of(described, tmp_path)
    engine = engine_of(place, model, tp)
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
    megatron_of_any_layout(family, world, layout, tp, engine_of, place, tmp_path)


@pytest.mark.parametrize("kinds", [("plain", "mixed"), ("offload", "hsdp")], ids=" and ".join)
def test_fsdp_trainers_of_each_kind_are_followed_version_by_version(kinds, place, tmp_path):
    fsdp_trainers_of_each_kind(kinds, engine_of, place, tmp_path)


def test_a_rank_that_cannot_prepare_a_version_keeps_all_ranks_at_the_old_one(place, tmp_path):
    described = case("llama", 1, layers=2, **SIZES)["hf"]
    model, config = model_of(described, tmp_path)
    engine = engine_of(place, model, 2)
    trainer = fsdp_trainer(place, described)
    trainer.tell("step")
    trainer.expect("published", 120)
    check_version(engine, config, 1, "reshard")
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
    check_version(engine, config, 2, "reshard")
