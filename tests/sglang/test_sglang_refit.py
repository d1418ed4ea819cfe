"""Real trainers, a real SGLang: after each version the engine generates what transformers and the trainer itself make of its weights."""

from __future__ import annotations

import json
import os

import pytest

from examples.first_light.replica import free_port
from mx_sglang.drive import refit_server
from tests.megatron.cases import case
from tests.support.refit_engines import (
    MODEL,
    PROMPTS,
    SIZES,
    fsdp_trainer,
    fsdp_trainers_of_each_kind,
    megatron_of_any_layout,
    model_of,
    place,
)
from tests.support.refit_server import a_server_follows
from tests.support.sglang_options import PYTHON
from tests.support.sglang_server import SglangServer

__all__ = ["place"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def engine_of(start, folder, tp, **variables):
    spec = {"model": str(folder), "tp": tp, "load_format": "dummy", "prompts": PROMPTS}
    engine = start("-m", "tests.support.sglang_engine", json.dumps(spec), interpreter=PYTHON, group=True, variables=variables)
    engine.expect("tokens", 300)
    return engine


@pytest.mark.parametrize(
    ("family", "layout", "tp"),
    [("llama", {"pp": 2, "tied": True}, 1), ("qwen2", {"tp": 2}, 2)],
    ids=["pp2 to tp1", "tp2 with qkv bias to tp2"],
)
def test_a_megatron_model_in_another_parallel_layout_is_followed_version_by_version(family, layout, tp, place, tmp_path):
    megatron_of_any_layout(family, 2, layout, tp, engine_of, place, tmp_path, paths=("reshard", "staged"))


def test_fsdp_trainers_are_followed_version_by_version(place, tmp_path):
    fsdp_trainers_of_each_kind(("plain", "hsdp"), engine_of, place, tmp_path, paths=("reshard", "staged"))


def test_a_server_takes_a_version_over_while_it_is_asked_and_keeps_the_old_one_when_that_fails(place, tmp_path):
    described = case("llama", 1, layers=2, **SIZES)["hf"] | {"initializer_range": 0.2}
    model, config = model_of(described, tmp_path)
    ours = {name: value for name, value in os.environ.items() if name.startswith("MX_")}
    server = SglangServer(model, free_port(), env=ours, load_format="dummy")
    try:
        trainer = fsdp_trainer(place, described, tmp_path, group=True)
        server.wait_healthy()
        a_server_follows(server, trainer, config, refit_server, lambda: requests_that_are_refused(server, model))
    finally:
        server.end()


def requests_that_are_refused(server, model):
    """SGLang's own endpoints, asked for what is not to be had."""
    told = server.get("/model_info")
    assert (told["weight_version"], told["model_path"]) == ("3", str(model))
    asked = {"model_path": MODEL, "load_format": "mx", "manifest": {"model_name": MODEL, "version": 9, "timeout": 0.5}}
    with pytest.raises(AssertionError, match="belongs between begin_weight_update and end_weight_update"):
        server.post("/update_weights_from_disk", asked)
    server.post("/begin_weight_update", {})
    with pytest.raises(AssertionError, match=r"version 9 of toy/refit was not installed: .*; version 3 still serves"):
        server.post("/update_weights_from_disk", asked)
    with pytest.raises(AssertionError, match=r"unknown refit settings .'wrong'."):
        server.post("/update_weights_from_disk", asked | {"manifest": {"wrong": 1}})
    server.post("/end_weight_update", {})
