"""A real vLLM server that follows a real trainer while it is asked, through vLLM's own update endpoints."""

from __future__ import annotations

import json
import os

import pytest

from mx_vllm.drive import refit_server
from tests.megatron.cases import case
from tests.support.refit_engines import SIZES, fsdp_trainer, model_of, place
from tests.support.refit_server import a_server_follows
from tests.support.vllm_server import VllmServer

__all__ = ["place"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_a_server_takes_a_version_over_while_it_is_asked_and_keeps_the_old_one_when_that_fails(place, free_port, tmp_path):
    described = case("llama", 1, layers=2, **SIZES)["hf"] | {"initializer_range": 0.2, "max_position_embeddings": 128}
    model, config = model_of(described, tmp_path)
    ours = {name: value for name, value in os.environ.items() if name.startswith("MX_")}
    flags = ["--weight-transfer-config", json.dumps({"backend": "mx"}), "--block-size", "32", "--enable-prefix-caching"]
    server = VllmServer(model, free_port, *flags, env=ours | {"VLLM_SERVER_DEV_MODE": "1"}, load_format="dummy")
    try:
        trainer = fsdp_trainer(place, described, tmp_path, group=True)
        server.wait_healthy()
        a_server_follows(server, trainer, config, refit_server)
    finally:
        server.end()
