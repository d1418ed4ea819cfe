"""The pure mapping: a table of what each parameter becomes, and that all ranks together tile every tensor."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_common.errors import ConfigError
from mx_megatron import FAMILIES, Layout, Ranks, parts_of
from mx_megatron.layout import publishes, stripped
from tests.megatron.cases import CASES
from tests.megatron.reference_layout import Reference

LLAMA = Layout("llama", layers=8, hidden=64, heads=8, groups=2, head_dim=16, ffn=96, vocab_size=250)
QWEN3_MOE = dataclasses.replace(LLAMA, family_name="qwen3_moe", experts=8, moe_ffn=32)
MIXTRAL = dataclasses.replace(QWEN3_MOE, family_name="mixtral")
LAYER = "model.layers.5."
SECOND = Ranks(tp=1, tp_size=2, ep=1, ep_size=2, etp=1, etp_size=2)

TABLE = [
    # parameter, local shape, layout, [(name, shape, start, size)]
    ("embedding.word_embeddings.weight", (128, 64), LLAMA, [("model.embed_tokens.weight", (250, 64), (128, 0), (122, 64))]),
    ("output_layer.weight", (128, 64), LLAMA, [("lm_head.weight", (250, 64), (128, 0), (122, 64))]),
    ("output_layer.weight", (128, 64), dataclasses.replace(LLAMA, tied=True), []),
    ("output_layer.weight", (128, 64), dataclasses.replace(LLAMA, vocab_size=128), []),
    ("decoder.final_layernorm.weight", (64,), LLAMA, [("model.norm.weight", (64,), (0,), (64,))]),
    ("input_layernorm.weight", (64,), LLAMA, [(LAYER + "input_layernorm.weight", (64,), (0,), (64,))]),
    ("self_attention.linear_qkv.layer_norm_weight", (64,), LLAMA, [(LAYER + "input_layernorm.weight", (64,), (0,), (64,))]),
    ("pre_mlp_layernorm.weight", (64,), LLAMA, [(LAYER + "post_attention_layernorm.weight", (64,), (0,), (64,))]),
    ("mlp.linear_fc1.layer_norm_weight", (64,), LLAMA, [(LAYER + "post_attention_layernorm.weight", (64,), (0,), (64,))]),
    (
        "self_attention.linear_qkv.bias",
        (96,),
        LLAMA,
        [
            (LAYER + "self_attn.q_proj.bias", (128,), (64,), (64,)),
            (LAYER + "self_attn.k_proj.bias", (32,), (16,), (16,)),
            (LAYER + "self_attn.v_proj.bias", (32,), (16,), (16,)),
        ],
    ),
    (  # one group over two ranks: the cut falls inside its queries, and the second rank has all of key and value
        "self_attention.linear_qkv.weight",
        (80, 64),
        dataclasses.replace(LLAMA, groups=1),
        [
            (LAYER + "self_attn.q_proj.weight", (128, 64), (80, 0), (48, 64)),
            (LAYER + "self_attn.k_proj.weight", (16, 64), (0, 0), (16, 64)),
            (LAYER + "self_attn.v_proj.weight", (16, 64), (0, 0), (16, 64)),
        ],
    ),
    ("self_attention.linear_proj.weight", (64, 64), LLAMA, [(LAYER + "self_attn.o_proj.weight", (64, 128), (0, 64), (64, 64))]),
    ("self_attention.linear_proj.bias", (64,), LLAMA, [(LAYER + "self_attn.o_proj.bias", (64,), (0,), (64,))]),
    ("self_attention.q_layernorm.weight", (16,), QWEN3_MOE, [(LAYER + "self_attn.q_norm.weight", (16,), (0,), (16,))]),
    (
        "mlp.linear_fc1.weight",
        (96, 64),
        LLAMA,
        [
            (LAYER + "mlp.gate_proj.weight", (96, 64), (48, 0), (48, 64)),
            (LAYER + "mlp.up_proj.weight", (96, 64), (48, 0), (48, 64)),
        ],
    ),
    (
        "mlp.linear_fc1.weight",
        (48, 64),
        dataclasses.replace(LLAMA, family_name="arcee"),
        [(LAYER + "mlp.up_proj.weight", (96, 64), (48, 0), (48, 64))],
    ),
    ("mlp.linear_fc2.weight", (64, 48), LLAMA, [(LAYER + "mlp.down_proj.weight", (64, 96), (0, 48), (64, 48))]),
    ("mlp.router.weight", (8, 64), QWEN3_MOE, [(LAYER + "mlp.gate.weight", (8, 64), (0, 0), (8, 64))]),
    ("mlp.router.weight", (8, 64), MIXTRAL, [(LAYER + "block_sparse_moe.gate.weight", (8, 64), (0, 0), (8, 64))]),
    (
        "mlp.experts.local_experts.3.linear_fc2.weight",
        (64, 16),
        QWEN3_MOE,
        [(LAYER + "mlp.experts.7.down_proj.weight", (64, 32), (0, 16), (64, 16))],
    ),
    (
        "mlp.experts.linear_fc1.weight0",
        (32, 64),
        MIXTRAL,
        [
            (LAYER + "block_sparse_moe.experts.4.w1.weight", (32, 64), (16, 0), (16, 64)),
            (LAYER + "block_sparse_moe.experts.4.w3.weight", (32, 64), (16, 0), (16, 64)),
        ],
    ),
]


@pytest.mark.parametrize(("name", "shape", "layout", "expected"), TABLE)
def test_the_second_of_two_ranks_holds_these_boxes(name, shape, layout, expected):
    full = name if name.startswith(("embedding", "output", "decoder")) else f"decoder.layers.5.{name}"
    found = [(part.name, part.shape, part.start, part.size) for part in parts_of(full, shape, layout, SECOND)]
    assert found == expected


@st.composite
def models(draw):
    """A layout, sizes of its parallel groups, and how it is built."""
    tp, etp, ep = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    family = draw(st.sampled_from(sorted(FAMILIES)))
    groups = draw(st.sampled_from([1, 2, 3, 4]))
    heads = groups * draw(st.integers(1, 3)) * (1 if groups % tp == 0 else tp)
    moe = bool(FAMILIES[family].expert)
    layout = Layout(
        family,
        layers=draw(st.integers(1, 2)),
        hidden=draw(st.integers(1, 4)) * 2,
        heads=heads,
        groups=groups,
        head_dim=draw(st.integers(1, 2)) * 4,
        ffn=draw(st.integers(1, 3)) * tp,
        vocab_size=draw(st.integers(1, 16)),
        experts=draw(st.integers(1, 2)) * ep if moe else 0,
        moe_ffn=draw(st.integers(1, 3)) * etp if moe else 0,
        shared_ffn=draw(st.integers(1, 2)) * tp if FAMILIES[family].shared_expert else 0,
        tied=draw(st.booleans()),
    )
    padded = -(-layout.vocab_size // tp) * tp + draw(st.integers(0, 4)) * tp
    return (
        Reference(layout, padded, bias=draw(st.booleans()), style=draw(st.sampled_from(["sequential", "grouped", "legacy"]))),
        tp,
        etp,
        ep,
    )


@settings(max_examples=150, deadline=None)
@given(models())
def test_what_all_ranks_publish_is_every_element_of_every_tensor_once_and_with_its_value(model):
    reference, tp, etp, ep = model
    published, width = {}, max(tp, etp * ep)
    for rank in range(width):
        ranks = Ranks(
            tp=rank % tp,
            tp_size=tp,
            etp=rank % etp,
            etp_size=etp,
            ep=rank // etp % ep,
            ep_size=ep,
            dp=rank // tp,
            edp=rank // (etp * ep),
        )
        for name, local in reference.parameters(ranks).items():
            for part in parts_of(name, local.shape, reference.layout, ranks):
                values = part.of(local)
                assert values.shape == part.size
                if not part.transposed:
                    assert np.shares_memory(values, local)
                box = (part.name, part.shape, tuple(slice(a, a + n) for a, n in zip(part.start, part.size, strict=True)))
                # replicas that do not publish hold the same
                assert np.array_equal(values, reference.whole[part.name][box[2]])
                if publishes(part, ranks):
                    published.setdefault(part.name, np.zeros(part.shape, dtype=int))[box[2]] += 1
    assert published.keys() == reference.whole.keys()
    assert all((count == 1).all() for count in published.values())


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.0.eh_proj.weight",
        "embedding.position_embeddings.weight",
        "decoder.layers.5.self_attention.linear_q_down_proj.weight",
        "decoder.layers.5.mlp.router.expert_bias",
        "decoder.layers.5.input_layernorm.bias",
        "decoder.layers.5.self_attention.linear_qkv.adapter.linear_in.weight",
        "decoder.layers.5.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.5.self_attention.q_layernorm.weight",
    ],
)
def test_a_parameter_that_the_family_has_no_place_for_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=name.replace(".", r"\.") + ".*llama.*leave_out"):
        parts_of(name, (4, 4), LLAMA, Ranks())


@pytest.mark.parametrize(
    ("name", "shape", "ranks", "message"),
    [
        ("decoder.layers.5.self_attention.linear_qkv.weight", (384, 64), Ranks(), r"\(384, 64\).*\(192, 64\)"),
        ("decoder.layers.5.mlp.linear_fc1.weight", (96, 64), Ranks(), r"\(96, 64\).*\(192, 64\)"),
        ("decoder.layers.5.mlp.linear_fc1.weight", (64, 64), Ranks(0, 5), "96 does not divide over 5"),
        ("decoder.layers.8.input_layernorm.weight", (64,), Ranks(), "8 layers"),
        ("embedding.word_embeddings.weight", (100, 64), Ranks(0, 2), "fewer than the vocabulary of 250"),
        ("decoder.layers.5.mlp.experts.local_experts.0.linear_fc1.weight", (64, 64), Ranks(), "0 experts"),
    ],
)
def test_shapes_that_contradict_the_configuration_are_refused(name, shape, ranks, message):
    with pytest.raises(ConfigError, match=message):
        parts_of(name, shape, LLAMA, ranks)


def test_an_expert_beyond_those_of_the_rank_is_refused():
    with pytest.raises(ConfigError, match="holds 4 of 8"):
        parts_of("decoder.layers.0.mlp.experts.linear_fc1.weight4", (64, 64), QWEN3_MOE, Ranks(ep_size=2))


@pytest.mark.parametrize(
    "name",
    [
        "module.module.decoder.layers.3.mlp.linear_fc2.weight",
        "_orig_mod.decoder.layers.3.mlp.linear_fc2.weight",
        "module.decoder.layers.3._checkpoint_wrapped_module.mlp.linear_fc2.weight",
        "decoder.layers.3.mlp._orig_mod.linear_fc2.weight",
    ],
)
def test_names_lose_what_wrappers_put_into_them(name):
    assert stripped(name) == "decoder.layers.3.mlp.linear_fc2.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family_name": "gpt2"}, "'gpt2' is not mapped"),
        ({"heads": 7}, "7 attention heads do not divide into 2"),
        ({"experts": 4}, "4 experts of width 0"),
        ({"experts": 4, "moe_ffn": 8}, "llama has no experts"),
        ({"hidden": 0}, "hidden is 0"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(LLAMA, **change)


@pytest.mark.parametrize("name", ["llama-tp1", "arcee-tp2", "qwen3-moe-ep2", "qwen2-moe-tp2", "mixtral-ep2"])
def test_the_layout_is_read_from_the_hugging_face_configuration(name):
    case = CASES[name]
    layout = Layout.from_hf(case["hf"])
    for size in ("layers", "hidden", "heads", "groups", "head_dim", "ffn", "experts", "moe_ffn", "shared_ffn", "tied"):
        assert getattr(layout, size) == case.get(size, 0), size
    assert layout.vocab_size == case["hf"]["vocab_size"]


@pytest.mark.parametrize(("missing", "message"), [("vocab_size", "lacks vocab_size"), ("model_type", "'' is not mapped")])
def test_a_configuration_without_a_size_is_refused(missing, message):
    config = {name: value for name, value in CASES["llama-tp1"]["hf"].items() if name != missing}
    with pytest.raises(ConfigError, match=message):
        Layout.from_hf(config)


@pytest.mark.parametrize("rank", [{"tp": 2, "tp_size": 2}, {"ep": -1}, {"etp": 1}])
def test_ranks_outside_their_group_are_refused(rank):
    with pytest.raises(ConfigError, match="rank"):
        Ranks(**rank)
