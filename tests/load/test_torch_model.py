"""A PyTorch engine's model on its way into the pack: what it hides, what is forgotten of it, how it is shared, when it is ready."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from mx_common.errors import LoadFailed, ManifestMismatch, TransferTimeout
from mx_common.identity import mx_source_id
from mx_common.load import Settings
from mx_common.load import serving as serving_module
from mx_common.load.serving import EngineReady, LoadReport, front_serves, withdraw
from mx_common.load.sharing import job_of, why_not_shared
from mx_common.load.torch_model import TorchModel, named_tensors
from mx_common.source_load import ServingLoad

CPU = torch.device("cpu")


class SmallModel(TorchModel):
    """An engine that keeps a registry of layers, and may pack its weight after loading: away, or into other tensors."""

    registry: dict[str, object]

    def __init__(self, pack=""):
        super().__init__("Toy", CPU, without="--load-format auto")
        self.registry, self.layers = {"another": 1}, ["another"]
        self.pack, self.forgotten, self.held = pack, 0, None

    def create(self, fill):
        self.remember(self.registry, self.layers)
        model = nn.Linear(4, 4)
        model.register_buffer("table", torch.zeros(8))
        self.registry["model"] = 1
        self.layers.append("model")
        if fill:
            nn.init.ones_(model.weight)
        before = self.processing(model)
        if self.pack:
            packed, model.weight.data = model.weight.data, torch.empty(0)
            if self.pack == "into tensors":
                model.absorbed = packed
        self.processed(model, before)
        return model

    def forget(self):
        self.forgotten += 1


def test_a_model_is_built_discarded_and_loaded_and_the_engines_registries_are_as_they_were():
    engine = SmallModel()
    assert engine.build().keys() == {"weight", "bias", "table"}
    assert not engine.model.training
    engine.discard()
    assert (engine.model, engine.forgotten) == (None, 1)
    assert (engine.registry, engine.layers) == ({"another": 1}, ["another"])
    assert torch.equal(engine.load_from_storage()["weight"], torch.ones(4, 4))
    assert "model" in engine.registry


def test_a_model_whose_memory_is_still_held_is_said_and_what_to_start_instead():
    engine = SmallModel()
    held = engine.build()["table"]
    with pytest.raises(LoadFailed, match=r"1 of 3 tensors .* still held by Toy.*--load-format auto"):
        engine.discard()
    del held


@pytest.mark.parametrize(("pack", "hidden"), [("", False), ("away", True), ("into tensors", False)])
def test_weights_that_processing_hides_cannot_be_received_and_those_it_moves_can(pack, hidden):
    engine = SmallModel(pack)
    if hidden:
        with pytest.raises(ManifestMismatch, match=r"Toy moved 64 bytes of 1 tensors \(weight"):
            engine.build()
        engine.discard()
        engine.load_from_storage()  # serves, and says why it is no source
        assert "out of sight" in engine.hidden
    else:
        assert engine.build().keys() >= {"weight", "bias"}
        assert engine.hidden == ""


def test_plain_tensor_attributes_are_among_what_serving_reads_and_those_elsewhere_are_not():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].scale = torch.ones(1)
    model[0].shadow = torch.ones(1, device="meta")
    assert named_tensors(model, CPU).keys() == {"0.weight", "0.bias", "0.scale"}


SAID = {
    "model": "org/model",
    "revision": None,
    "dtype": torch.bfloat16,
    "quantization": None,
    "configuration": {"hidden_size": 8, "_name_or_path": "/here"},
    "device": "cpu",
    "rank": 1,
    "world": 2,
    "tensor_parallel": 2,
}


def test_a_rank_is_shared_under_what_the_engine_says_unless_the_settings_say_otherwise():
    job = job_of("toy", 3, "1.2", Settings(), **SAID)
    assert (job.rank, job.world, job.engine, job.accelerator, job.refused) == (1, 2, "toy", "cpu", "")
    same = job.identity
    assert (same.model_name, same.dtype, same.revision, same.gpu_arch) == ("org/model", "bfloat16", "", "")
    assert (same.backend_framework, same.backend_framework_version) == (3, "1.2")
    assert (same.tensor_parallel_size, same.pipeline_parallel_size, same.expert_parallel_size) == (2, 1, 1)
    told = job_of("toy", 3, "1.2", Settings(model_name="shared/name", revision="abc"), **SAID).identity
    assert (told.model_name, told.revision) == ("shared/name", "abc")


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        ({"configuration": {"hidden_size": 8, "_name_or_path": "/elsewhere"}}, True),
        ({"rank": 0}, True),
        ({"configuration": {"hidden_size": 9}}, False),
        ({"dtype": torch.float16}, False),
        ({"quantization": "fp8"}, False),
        ({"tensor_parallel": 1}, False),
        ({"layout": {"attention_tensor_parallel_size": "1"}}, False),
        ({"revision": "abc"}, False),
    ],
)
def test_only_what_changes_the_tensors_changes_the_source_id(change, equal):
    ids = [mx_source_id(job_of("toy", 3, "1.2", Settings(), **{**SAID, **said}).identity) for said in ({}, change)]
    assert (ids[0] == ids[1]) == equal


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, ""),
        ({"draft": True}, "draft model"),
        ({"quantization": "fp8"}, "quantisation fp8"),
        ({"experts": True}, "experts are packed"),
        ({"unmapped_by": "sleep mode"}, "sleep mode unmaps"),
        ({"moves_experts": True}, "expert load balancing"),
    ],
)
def test_models_whose_memory_is_not_the_weights_are_not_shared(said, why):
    refused = why_not_shared(**said)
    assert why in refused
    assert bool(refused) == bool(why)


def test_an_engine_is_ready_when_its_front_end_says_so_and_not_after_that_has_ended():
    channel = ServingLoad("toy-instance")
    ready = EngineReady(channel)
    ready.warmed_up()
    assert not ready(), "a front end may still come"
    channel.publish(0.0, ready=False)
    assert not ready()
    channel.publish(0.0, ready=True)
    assert ready()
    channel.close()
    assert not ready()


def test_an_engine_without_a_front_end_is_ready_a_while_after_its_warm_up(monkeypatch):
    monkeypatch.setattr(serving_module, "NO_FRONT_SECONDS", 0.0)
    ready = EngineReady(ServingLoad("toy-instance"))
    assert not ready()
    ready.warmed_up()
    assert ready()


def test_a_report_says_the_larger_of_queue_and_cache_and_an_idle_engine_goes_on_reporting(monkeypatch):
    monkeypatch.setattr(serving_module, "REPORT_SECONDS", 0.02)
    channel = ServingLoad("toy-instance")
    report = LoadReport(channel)
    report.ready = True
    for running, waiting, cache, load in ((2, 2, 0.1, 0.5), (8, 8, 0.1, 1.0), (0, 0, 0.7, 0.7), (0, 0, 0.0, 0.0)):
        report.observe(running, waiting, 8, cache)
        report.publish()
        assert channel.read().load == pytest.approx(load)
    channel.close()
    while channel.read() is None:  # the thread says it again
        pass
    report._farewell()
    assert channel.read() is None


def test_a_front_end_speaks_for_each_engine_that_it_has_and_again_for_the_next_one():
    channels = [ServingLoad("toy-front", index) for index in range(2)]
    ready = [EngineReady(channel) for channel in channels]
    front_serves(channels[:1])
    front_serves(channels)
    assert [one() for one in ready] == [True, True]
    for report in (serving_module._fronts.pop(channel) for channel in channels):
        report._farewell()
    assert [one() for one in ready] == [False, False]


def test_an_engine_may_write_to_its_model_even_if_the_source_of_it_could_not_let_go(monkeypatch, caplog):
    class Stuck:
        def close(self):
            raise TransferTimeout("a reader holds on")

    model = nn.Linear(2, 2)
    monkeypatch.setitem(serving_module._sources, model, Stuck())
    withdraw(model, logging.getLogger("tests.load"))
    assert "a reader holds on" in caplog.text
    assert model not in serving_module._sources
