"""What cannot be published is refused by name: parameters, buffers, memory, and configurations that contradict each other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mx_common.errors import ConfigError
from mx_megatron import Layout, Ranks, held_tensors, layout_of
from mx_megatron.model import Copies
from tests.megatron.cases import case

TOY = case("llama", layers=3)
LAYOUT = Layout.from_hf(TOY["hf"])
CONFIG = {
    "num_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "gated_linear_unit": True,
    "num_moe_experts": None,
}


class Layer(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.layer_number = number
        self.input_layernorm = torch.nn.RMSNorm(64)
        self.mlp = torch.nn.Module()
        self.mlp.linear_fc2 = torch.nn.Linear(96, 64, bias=False)


class Chunk(torch.nn.Module):
    """Named as a chunk of Megatron's GPTModel is; its layers are the second and third of the model."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(**CONFIG)
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([Layer(2), Layer(3)])


def names(model, **more):
    return [h.name for h in held_tensors(model, LAYOUT, Ranks(), **more)]


def test_layers_are_named_by_their_place_in_the_whole_model_also_in_wrappers_and_lists():
    expected = [f"model.layers.{layer}.{name}.weight" for layer in (1, 2) for name in ("input_layernorm", "mlp.down_proj")]
    chunk = Chunk()
    outer = torch.nn.Module()
    outer.module = torch.nn.Module()
    outer.module.module = chunk
    assert names(chunk) == names([chunk]) == names(outer) == expected


def test_memory_is_not_copied():
    chunk = Chunk()
    held = held_tensors(chunk, LAYOUT, Ranks())
    assert [h.tensor.data_ptr() for h in held] == [p.data_ptr() for p in chunk.parameters()]
    assert not any(h.tensor.requires_grad for h in held)


def test_a_parameter_without_a_counterpart_stops_publishing_unless_it_is_left_out_by_name():
    chunk = Chunk()
    chunk.mtp = torch.nn.Module()
    chunk.mtp.eh_proj = torch.nn.Linear(4, 4, bias=False)
    with pytest.raises(ConfigError, match=r"mtp\.eh_proj\.weight"):
        names(chunk)
    assert names(chunk, leave_out=["mtp.*"]) == names(Chunk())


def test_a_pattern_that_matches_nothing_is_a_spelling_error():
    with pytest.raises(ConfigError, match=r"mpt\.\*"):
        names(Chunk(), leave_out=["mpt.*"])


def test_state_that_only_a_buffer_holds_is_not_left_out_silently():
    chunk = Chunk()
    chunk.decoder.layers[0].mlp.register_buffer("counted", torch.zeros(4), persistent=False)
    names(chunk)
    chunk.decoder.layers[1].mlp.register_buffer("expert_bias", torch.zeros(4))
    with pytest.raises(ConfigError, match=r"decoder\.layers\.2\.mlp\.expert_bias"):
        names(chunk)


class Quantised(torch.nn.Parameter):
    pass


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (Quantised(torch.zeros(64)), "is a Quantised"),
        (torch.nn.Parameter(torch.zeros(128)[::2]), "strides"),
    ],
)
def test_memory_that_is_not_the_plain_tensor_is_refused(parameter, message):
    chunk = Chunk()
    chunk.decoder.layers[0].input_layernorm.weight = parameter
    with pytest.raises(ConfigError, match=rf"decoder\.layers\.1\.input_layernorm\.weight .*{message}"):
        names(chunk)


def test_a_parameter_whose_memory_is_released_is_refused():
    chunk = Chunk()
    chunk.decoder.layers[0].input_layernorm.weight.untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match="no memory just now"):
        names(chunk)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_layers", 4),
        ("num_query_groups", 4),
        ("kv_channels", 32),
        ("gated_linear_unit", False),
        ("num_moe_experts", 8),
        ("multi_latent_attention", True),
        ("layernorm_zero_centered_gamma", True),
        ("attention_output_gate", True),
    ],
)
def test_a_hugging_face_configuration_of_another_model_is_refused(setting, value):
    chunk = Chunk()
    assert layout_of(TOY["hf"], chunk) == LAYOUT
    setattr(chunk.config, setting, value)
    with pytest.raises(ConfigError, match=f"{setting} is {value!r} in Megatron"):
        layout_of(TOY["hf"], chunk)


@pytest.mark.parametrize(("content", "message"), [(None, "No such file"), ("{", "Expecting"), ("[]", "JSON object")])
def test_a_configuration_that_cannot_be_read_is_named(content, message, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message) as why:
        layout_of(tmp_path, Chunk())
    assert str(tmp_path / "config.json") in str(why.value)


def test_copies_keep_their_addresses_and_take_new_values():
    copies, source = Copies(), torch.arange(6.0).reshape(2, 3)
    first = copies.of("a", source.T)
    assert first.is_contiguous()
    address = first.data_ptr()
    source += 1
    assert copies.of("a", source.T).data_ptr() == address
    assert torch.equal(first, source.T)
    assert (len(copies), copies.total_bytes) == (1, 24)
