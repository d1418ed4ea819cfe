"""Real Megatron models: what the ranks hold is, put together, the model that transformers loads."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.megatron.cases import CASES
from tests.megatron.megatron_child import TOKENS

LIMIT = 1e-5


def load_strictly(tensors, config, folder):
    """The model of transformers, with exactly these tensors."""
    import torch
    from safetensors.numpy import save_file
    from transformers import AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: np.ascontiguousarray(values) for name, values in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {kind: sorted(map(str, found)) for kind, found in report.items() if found}
    assert not wrong, wrong
    return model.eval()


def difference(tensors, outcome, folder):
    """The largest between the logits of transformers and of Megatron."""
    import torch

    config = outcome.case["hf"]
    with torch.no_grad():
        logits = load_strictly(tensors, config, folder)(torch.from_numpy(TOKENS)).logits.numpy()
    assert np.isfinite(logits).all()
    assert logits.std() > 0.1
    return float(np.abs(logits - outcome.logits[..., : config["vocab_size"]]).max())


@pytest.mark.parametrize("name", CASES)
def test_ranks_publish_every_element_and_transformers_computes_megatrons_logits_from_them(name, outcomes, tmp_path):
    outcome = outcomes[name]
    tensors, times = outcome.assembled()
    if outcome.case.get("replicas"):
        assert all((count >= 1).all() for count in times.values())
    else:
        assert all((count == 1).all() for count in times.values())
    assert difference(tensors, outcome, tmp_path) <= LIMIT


def test_queries_keys_and_values_taken_one_after_the_other_give_another_model(outcomes, tmp_path):
    outcome = outcomes["llama-tp1"]
    tensors, _ = outcome.assembled()
    sizes = outcome.case
    per_group, dim = sizes["heads"] // sizes["groups"] * sizes["head_dim"], sizes["head_dim"]
    for layer in range(sizes["layers"]):
        q, k, v = names = [f"model.layers.{layer}.self_attn.{kind}_proj.weight" for kind in "qkv"]
        groups = range(sizes["groups"])
        fused = np.concatenate(
            [
                block
                for g in groups
                for block in (
                    tensors[q][g * per_group : (g + 1) * per_group],
                    tensors[k][g * dim : (g + 1) * dim],
                    tensors[v][g * dim : (g + 1) * dim],
                )
            ]
        )
        ends = np.cumsum([len(tensors[name]) for name in names])[:-1]
        for name, part in zip(names, np.split(fused, ends), strict=True):
            tensors[name] = part
    assert difference(tensors, outcome, tmp_path) > 1e-2


def test_parameters_are_published_where_they_lie_also_in_megatrons_flat_buffers(outcomes):
    for name, outcome in outcomes.items():
        if outcome.case.get("grouped") == "legacy":
            continue
        for facts in outcome.facts:
            assert facts["copies"] == 0, name
            assert facts["in_place"] == len(facts["held"]), name
    assert all(facts["moved"] for facts in outcomes["llama-tp2-wrapped-in-ddp"].facts)


def test_only_the_experts_of_the_legacy_grouped_mlp_are_copies(outcomes):
    for facts in outcomes["qwen3-moe-tp2-ep2-grouped-legacy"].facts:
        experts = [name for name, *_ in facts["held"] if ".experts." in name]
        assert facts["copies"] == len(experts) > 0
        assert facts["in_place"] == len(facts["held"]) - len(experts)


def test_a_rank_that_holds_only_padding_publishes_no_row_of_the_vocabulary(outcomes):
    first, second = outcomes["llama-tp2-one-rank-of-padding"].facts
    names = {"model.embed_tokens.weight", "lm_head.weight"}
    assert names <= {name for name, *_ in first["held"]}
    assert not names & {name for name, *_ in second["held"]}


def test_the_second_data_parallel_rank_publishes_nothing_unless_replicas_are_asked_for(outcomes):
    first, second = outcomes["llama-dp2"].facts
    assert first["held"]
    assert second["held"] == []
    told = [sorted(name for name, *_ in facts["held"]) for facts in outcomes["llama-tp2-dp2-replicas"].facts]
    assert told[0] == told[1] == told[2] == told[3] != []


def test_tied_models_publish_no_output_layer(outcomes):
    for name in ("llama-tp1-tied", "llama-pp2-tied", "qwen3-tp2"):
        tensors, _ = outcomes[name].assembled()
        assert "lm_head.weight" not in tensors


def test_no_two_ranks_of_a_tensor_parallel_group_hold_equal_shards_so_that_a_swap_would_show(outcomes):
    first, second = ({(name, tuple(start)): values for name, _, start, values in rank} for rank in outcomes["llama-tp2"].ranks)
    pairs = [(name, values, second[name, start]) for name, start in second for (n, _), values in first.items() if n == name]
    assert {name for name, *_ in pairs} >= {
        "model.embed_tokens.weight",
        "model.layers.3.mlp.down_proj.weight",
        "lm_head.weight",
    }
    for name, one, other in pairs:
        rows, columns = (min(pair) for pair in zip(one.shape, other.shape, strict=True))  # the last rank's rows may be padding
        assert not np.array_equal(one[:rows, :columns], other[:rows, :columns]), name
