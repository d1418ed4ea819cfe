"""A real Megatron trainer publishes over NIXL; a model of transformers that receives each version computes the trainer's logits."""

from __future__ import annotations

import contextlib
import json
import logging

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mx_common.directory import DirectoryServer
from mx_common.refit.capture import capture
from mx_common.refit.engine import RefitJob
from mx_common.refit.receiver import Receiver
from tests.megatron.cases import VOCABULARY, case
from tests.megatron.megatron_child import TOKENS
from tests.support.process import Process

MODEL, STEPS = "toy/megatron", 2


class TransformersEngine:
    """Receives into the parameters of a transformers model, one rank."""

    refused = ""

    def __init__(self, config):
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        self.serving = None

    def parameters(self):
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    def derived(self):
        return ()

    def capture(self, tensors):
        twin = {name: torch.empty_like(p, device="meta") for name, p in self.parameters().items()}
        return capture(lambda stream: self._copy(twin, stream), twin, tensors)

    def load(self, tensors):
        self._copy(self.parameters(), tensors)

    def _copy(self, parameters, tensors):
        for name, tensor in tensors:
            parameters[name].copy_(tensor)

    def paused(self):
        return contextlib.nullcontext()

    def installed(self, version):
        self.serving = version

    def refuse(self, reason):
        raise AssertionError(reason)

    def logits(self):
        with torch.no_grad():
            return self.model(torch.from_numpy(TOKENS)).logits.numpy()


@pytest.mark.parametrize("tied", [False, True])
def test_every_version_of_a_tensor_parallel_trainer_reaches_an_engine_on_both_paths(tied, tmp_path, monkeypatch):
    monkeypatch.setenv("MX_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("MX_RECORDS_FILE", str(tmp_path / "records.jsonl"))
    run = {
        "via": "served",
        "world": 2,
        "tp": 2,
        "overlap": False,
        "replicas": False,
        "steps": STEPS,
        "model": MODEL,
        "tied": tied,
    }
    (tmp_path / "runs.json").write_text(json.dumps([run]))
    config = AutoConfig.for_model(**case("llama", layers=2, tied=tied)["hf"])
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(DirectoryServer("127.0.0.1:0"))
        monkeypatch.setenv("MX_SERVER_ADDRESS", server.address)
        own = {"MX_SERVER_ADDRESS": server.address, "MX_RUNTIME_DIR": str(tmp_path / "run")}
        trainer = Process(
            "-W", "ignore", "-m", "tests.megatron.trainer_child", tmp_path / "runs.json", tmp_path / "out", env=own
        )
        stack.callback(trainer.end)
        engines = {}
        for path in ("reshard", "staged"):
            engine = TransformersEngine(config)
            job = RefitJob(MODEL, f"engine-{path}", path=path, engine="transformers", framework="megatron")
            engines[path] = engine, stack.enter_context(Receiver(job, engine, logging.getLogger("tests.megatron")))
        for version in range(STEPS + 1):
            assert trainer.expect("published", 120) == str(version)
            wanted = np.load(tmp_path / "out" / "0" / f"logits{version}.npy")[..., :VOCABULARY]
            for path, (engine, receiver) in engines.items():
                before = engine.logits()
                done = receiver.update(version)
                assert (done.version, engine.serving, done.verified, done.unused) == (version, version, True, ()), path
                assert np.abs(engine.logits() - wanted).max() <= 1e-5, path
                assert np.abs(before - wanted).max() > 1e-2, path
            (tmp_path / "out" / "0" / f"seen{version}").touch()
        assert "done" in trainer.output(60)
