"""A live PyTorch model: found under every name, looked at on meta, kept from serving, and loaded layer by layer."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from mx_common.errors import CoverageError, WeightsBroken
from mx_common.refit import live
from mx_common.refit.torch_engine import TorchRefit

CPU = torch.device("cpu")
log = logging.getLogger("tests.refit")


def loader(param, loaded):
    param.data.copy_(loaded)


class Small(nn.Module):
    """Two layers and a head that is tied to the embedding; parameters carry loaders, as in real engines."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(6, 4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.packed_away = nn.Parameter(torch.empty(0), requires_grad=False)
        self.also_away = nn.Parameter(torch.empty(0), requires_grad=False)
        self.register_buffer("order", torch.tensor([1, 0]), persistent=False)
        for name, parameter in self.named_parameters():
            parameter.weight_loader = loader
            parameter.called = name

    def forward(self, tokens):
        return self.down(self.up(self.embed(tokens)))

    def compute_logits(self, hidden):
        return self.head(hidden)

    def load_weights(self, tensors):
        named = dict(self.named_parameters())
        for name, tensor in tensors:
            named[name].weight_loader(named[name], tensor)


def held(model):
    """What every module holds, by identity, and every value."""
    ids = {name: {key: id(value) for key, value in vars(module).items()} for name, module in model.named_modules()}
    parts = {name: (list(module._parameters.items()), list(module._buffers.items())) for name, module in model.named_modules()}
    return ids, {name: [(key, id(t)) for part in both for key, t in part] for name, both in parts.items()}


def test_tensors_are_found_under_every_name_and_empty_ones_do_not_serve():
    model = Small()
    assert {"embed.weight", "head.weight", "packed_away", "order"} <= live.named(model).keys()
    serving = live.serving(model, CPU)
    assert "packed_away" not in serving
    assert ["embed.weight", "head.weight"] in list(live.by_address(serving).values())


def test_on_meta_parameters_have_their_loaders_and_share_what_they_share_live():
    model = Small()
    with live.on_meta(model) as expected:
        assert all(t.is_meta for name, t in expected.items() if name != "order")
        assert not expected["order"].is_meta
        assert expected["embed.weight"] is expected["head.weight"] is model.embed.weight
        assert expected["packed_away"] is not expected["also_away"]
        assert expected["up.weight"].weight_loader is loader
        assert expected["up.weight"].called == "up.weight"
        assert isinstance(model.up.weight, nn.Parameter)


@pytest.mark.parametrize("fails", [False, True])
def test_whatever_happens_on_meta_the_model_is_as_it_was(fails):
    model = Small()
    before, values = held(model), {name: t.clone() for name, t in live.named(model).items()}
    try:
        with live.on_meta(model) as expected:
            model.load_weights((name, torch.ones(expected[name].shape)) for name in FACTS)
            model.order = torch.zeros(3)
            model.register_buffer("more", torch.zeros(1))
            model.up.note = "left behind"
            del model.down.bias
            if fails:
                raise KeyError("no.such.tensor")
    except KeyError:
        assert fails
    assert held(model) == before
    assert all(torch.equal(t, values[name]) for name, t in live.named(model).items())


def test_an_engine_that_records_what_its_loaders_expect_puts_that_in_place():
    model = Small()
    recorded = torch.empty(8, 4, device="meta")
    shared = []

    def as_loaded(layer):
        if isinstance(layer, nn.Embedding) or layer is model.head:
            layer._parameters["weight"] = torch.empty(6, 4, device="meta")
            shared.append(layer._parameters["weight"])
        elif layer is model.up:
            layer._parameters["weight"] = recorded

    with live.on_meta(model, as_loaded) as expected:
        assert expected["up.weight"] is recorded
        assert expected["embed.weight"] is expected["head.weight"] is shared[0]
        assert not expected["down.weight"].is_meta


@pytest.mark.parametrize("change", [None, "shape", "dtype", "stride", "gone"])
def test_a_layer_is_laid_out_as_recorded_unless_shape_dtype_or_strides_differ(change):
    layer = nn.Linear(4, 4, bias=False)
    recorded = {"weight": torch.empty(4, 4, device="meta")}
    if change == "gone":
        del layer.weight
    elif change is not None:
        data = {"shape": torch.empty(4, 8), "dtype": torch.empty(4, 4).half(), "stride": torch.empty(4, 4).t()}[change]
        layer.weight = nn.Parameter(data)
    assert live.same_layout(layer, recorded) == (change is None)


def steps(model):
    """Every way in which engines take a step."""
    tokens, hidden = torch.tensor([1, 2]), torch.ones(1, 4)
    return {
        "a call": lambda: model(tokens),
        "forward itself, hooks or not": lambda: model.forward(tokens),
        "logits after a replayed graph": lambda: model.compute_logits(hidden),
    }


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_with_mixed_weights_takes_no_step_until_it_is_readmitted(compiled):
    model = Small()
    if compiled:
        model.compile(backend="eager")
    expected = {name: step() for name, step in steps(model).items()}
    before = dict(vars(model))
    live.refuse(model, "version 7 was half written")
    live.refuse(model, "another reason")
    for step in steps(model).values():
        with pytest.raises(WeightsBroken, match="version 7 was half written"):
            step()
    assert live.refusal(model) == "version 7 was half written"
    live.readmit(model)
    live.readmit(model)
    assert live.refusal(model) == ""
    assert vars(model) == before
    assert {name: torch.equal(step(), expected[name]) for name, step in steps(model).items()} == dict.fromkeys(expected, True)


def test_a_step_that_an_engine_put_on_the_instance_is_put_back():
    model = Small()
    model.forward = wrapped = lambda tokens: "wrapped"
    live.refuse(model, "mixed")
    with pytest.raises(WeightsBroken):
        model(torch.tensor([1]))
    live.readmit(model)
    assert model.forward is wrapped
    assert model(torch.tensor([1])) == "wrapped"


def test_a_model_without_logits_is_refused_as_well_and_a_capture_leaves_it_refused():
    model = nn.Linear(2, 2)
    live.refuse(model, "mixed")
    assert not hasattr(model, "compute_logits")
    with live.on_meta(model):
        pass
    with pytest.raises(WeightsBroken):
        model(torch.ones(2))
    live.readmit(model)
    assert model(torch.ones(2)).shape == (2,)


class Repacking(TorchRefit):
    """An engine that serves `up` transposed: its tensors are kept until the layer is complete."""

    def __init__(self, model):
        super().__init__("Toy", model, CPU, log)
        model.up.weight.data = model.up.weight.data.t().contiguous()
        self.kept, self.derived, self.back = [], [], 0

    def as_loaded(self):
        def put(layer):
            for name, parameter in layer._parameters.items():
                if parameter is None:
                    continue
                shape = (8, 4) if layer is self.model.up and name == "weight" else parameter.shape
                layer._parameters[name] = twin = torch.empty(shape, device="meta")
                twin.weight_loader = loader

        return live.on_meta(self.model, put)

    def repacked(self):
        return {"up": self.model.up}

    def take_apart(self, layer):
        for parameter in layer._parameters.values():
            parameter.weight_loader = lambda param, loaded: self.kept.append((param, loaded))

    def repack(self):
        for param, loaded in self.kept:
            param.data.copy_(loaded.t() if loaded.dim() == 2 else loaded)
        self.kept = []

    def put_back(self, layer):
        self.kept, self.back = [], self.back + 1

    def derive(self, repacked):
        self.derived.append(len(repacked))


FACTS = {name: (tuple(t.shape), t.dtype) for name, t in Small().named_parameters() if t.numel()}


def test_layers_that_serve_as_loaded_are_pieces_and_a_repacked_layer_goes_whole_through_the_loader():
    engine = Repacking(Small())
    found = engine.capture(FACTS)
    assert set(found.whole) == {"up.weight", "up.bias"}
    assert {piece.tensor for piece in found.pieces} == FACTS.keys() - set(found.whole)
    assert found.reasons["up.bias"] == "Toy serves up.bias in another layout than it loads it"


def test_a_part_of_a_repacked_layer_is_refused_and_none_of_it_is_not():
    engine = Repacking(Small())
    with pytest.raises(CoverageError, match=r"Toy repacks up as a whole, .* leave up.bias unwritten"):
        engine.capture({"up.weight": FACTS["up.weight"]})
    assert engine.capture({"down.weight": FACTS["down.weight"]}).whole == ()


def test_a_tensor_that_shares_memory_with_a_repacked_layer_goes_whole_too():
    class TiedHead(Repacking):
        def repacked(self):
            return {"head": self.model.head}

    assert set(TiedHead(Small()).capture(FACTS).whole) >= {"embed.weight"}


def test_what_is_loaded_in_several_calls_is_kept_until_the_pause_ends_and_repacked_then():
    engine = Repacking(Small())
    weight, bias = torch.arange(32.0).reshape(8, 4), torch.ones(8)
    was = engine.model.up.weight.data.clone()
    with engine.paused():
        area = weight.clone()
        engine.load([("up.weight", area)])
        area.fill_(float("nan"))  # the caller's memory holds the next tensors by then
        engine.load([("up.bias", bias), ("down.bias", torch.full((4,), 3.0))])
        assert torch.equal(engine.model.up.weight, was)
        assert torch.equal(engine.model.down.bias, torch.full((4,), 3.0))
        assert not engine.derived
    assert torch.equal(engine.model.up.weight, weight.t())
    assert torch.equal(engine.model.up.bias, bias)
    assert engine.derived == [1]
    assert engine.back == 0


def test_what_a_loader_keeps_is_its_own_and_not_the_memory_that_it_came_in():
    class Keeping(Small):
        def load_weights(self, weights):
            for name, loaded in weights:
                if name == "embed.weight":
                    self.table = loaded
                else:
                    self.get_parameter(name).data.copy_(loaded)

    engine = TorchRefit("Toy", Keeping(), CPU, log)
    assert engine.capture(FACTS).reasons == {"embed.weight": "the loader keeps the tensor itself"}
    area = torch.ones(FACTS["embed.weight"][0])
    engine.load([("embed.weight", area)])
    area.fill_(float("nan"))  # the next version, which is not installed yet
    assert torch.equal(engine.model.table, torch.ones_like(area))


def test_a_load_that_fails_puts_the_layers_back_and_the_next_one_begins_anew():
    engine = Repacking(Small())
    was = engine.model.up.weight.data.clone()
    with pytest.raises(KeyError), engine.paused():
        engine.load([("up.weight", torch.ones(8, 4)), ("no.such.tensor", torch.ones(1))])
    assert (engine.back, engine.derived, engine.kept) == (1, [], [])
    assert torch.equal(engine.model.up.weight, was)
    engine.load([("up.weight", torch.ones(8, 4)), ("up.bias", torch.ones(8))])
    assert torch.equal(engine.model.up.weight, torch.ones(4, 8))


def test_a_pause_in_which_only_pieces_are_written_derives_what_others_keep():
    engine = Repacking(Small())
    with engine.paused(), engine.paused():
        assert not engine.derived
    assert engine.derived == [0]


def test_an_engine_reports_what_was_installed_and_serves_again():
    engine = TorchRefit("Toy", Small(), CPU, log)
    engine.refuse("mixed")
    assert engine.refused == "mixed"
    engine.installed(7)
    assert (engine.serving, engine.refused) == (7, "")
