"""What real FSDP2 trainers hold is, box by box and bit by bit, the full state dict of the same step."""

from __future__ import annotations

import pytest
import torch

from tests.fsdp.fsdp_parts import assembled

WHOLE = [(2, case) for case in ("plain", "mixed", "offload", "bf16", "ignored", "columns", "experts")]
WHOLE += [(4, case) for case in ("plain", "mixed", "offload", "hsdp", "experts")]


def named(held):
    return [name for name, *_ in held]


@pytest.mark.parametrize(("world", "case"), WHOLE)
def test_the_parts_of_all_ranks_are_the_full_state_dict_each_element_once(fsdp_runs, world, case):
    run = fsdp_runs[world]
    for moment in (m for m in run.moments(case) if m not in ("all", "as_they_are")):
        whole, full = assembled(run.held(case, moment)), run.full(case, moment)
        assert set(whole) == set(full)
        for name, (value, count) in whole.items():
            assert (count == 1).all(), f"{name} at {moment}"
            assert (value.dtype, value.shape) == (full[name].dtype, full[name].shape)
            assert torch.equal(value, full[name]), f"{name} at {moment}"


@pytest.mark.parametrize(
    ("world", "case"), [(2, "plain"), (2, "mixed"), (2, "offload"), (2, "bf16"), (4, "plain"), (4, "hsdp")]
)
def test_an_optimizer_step_changes_the_weights_and_moves_none_of_them(fsdp_runs, world, case):
    run = fsdp_runs[world]
    before, after = run.full(case, "before"), run.full(case, "step1")
    assert [n for n in before if n != "seen" and torch.equal(before[n], after[n])] == []
    for rank in range(world):
        addresses = [[address for *_, address in run.held(case, moment)[rank]] for moment in ("before", "step1", "step2")]
        assert addresses[0] == addresses[1] == addresses[2]


@pytest.mark.parametrize("world", [2, 4])
def test_masters_stay_fp32_under_a_bf16_policy(fsdp_runs, world):
    held = fsdp_runs[world].held("mixed", "step1")
    assert {tensor.dtype for rank in held for name, _, _, tensor, _ in rank if name != "seen"} == {torch.float32}


def test_rows_that_do_not_divide_are_held_without_the_padding(fsdp_runs):
    parts = [
        (start[0], len(tensor))
        for rank in fsdp_runs[2].held("plain", "before")
        for name, _, start, tensor, _ in rank
        if name == "lm_head.weight"
    ]
    assert parts == [(0, 126), (126, 125)]


def test_a_rank_without_rows_of_a_tensor_holds_none_of_it(fsdp_runs):
    ranks = fsdp_runs[4].held("plain", "before")
    assert ["few.weight" in named(held) for held in ranks] == [True, True, True, False]


def test_buffers_of_the_checkpoint_and_ignored_parameters_come_from_rank_0_and_scratch_from_nobody(fsdp_runs):
    first, second = fsdp_runs[2].held("ignored", "step1")
    alone = {"seen", "model.norm.weight", "few.weight"}
    assert alone <= set(named(first))
    assert not alone & set(named(second))
    assert "scratch" not in named(first)


def test_hsdp_publishes_from_the_first_replica_group_only(fsdp_runs):
    assert [bool(held) for held in fsdp_runs[4].held("hsdp", "step2")] == [True, True, False, False]


def test_hsdp_publishes_equal_boxes_from_every_replica_group_when_asked(fsdp_runs):
    run = fsdp_runs[4]
    whole, full = assembled(run.held("hsdp", "all")), run.full("hsdp", "all")
    assert set(whole) == set(full)
    for name, (value, count) in whole.items():
        assert (count == (1 if name == "seen" else 2)).all()
        assert torch.equal(value, full[name])


def test_fsdp_on_top_of_tensor_parallelism_covers_every_tensor_and_only_unsharded_ones_twice(fsdp_runs):
    run = fsdp_runs[4]
    assert "_StridedShard" in run.facts("tensor_parallel")[0]["placements"]
    whole, full = assembled(run.held("tensor_parallel", "before")), run.full("tensor_parallel", "before")
    assert set(whole) == set(full)
    for name, (value, count) in whole.items():
        parallel = "mlp" in name or name == "lm_head.weight"
        assert (count == (1 if parallel else 2)).all(), name
        assert torch.equal(value, full[name]), name


@pytest.mark.parametrize("moment", ["between", "after_evaluation"])
def test_while_parameters_are_gathered_the_shards_of_the_last_step_are_what_is_held(fsdp_runs, moment):
    run = fsdp_runs[2]
    kind, dtype = run.facts("gathered")[0]["registered"]
    assert (kind, dtype) == ("Parameter", torch.bfloat16)  # the module really had the gathered copy in place
    whole, full = assembled(run.held("gathered", moment)), run.full("gathered", moment)
    assert all(torch.equal(value, full[name]) and (count == 1).all() for name, (value, count) in whole.items())
    for rank in range(2):
        was, now = run.held("gathered", "after_step")[rank], run.held("gathered", moment)[rank]
        assert [(h[0], h[4]) for h in was] == [(h[0], h[4]) for h in now]


def test_taking_the_shards_between_forward_and_backward_leaves_backward_what_it_needs(fsdp_runs):
    assert [facts["finite"] for facts in fsdp_runs[2].facts("gathered")] == [True, True]


@pytest.mark.parametrize("moment", ["inside", "outside"])
def test_names_are_the_checkpoints_whatever_wraps_the_model_and_tied_parameters_come_once(fsdp_runs, moment):
    run = fsdp_runs[2]
    plain = run.facts("wrapped")[0]["plain_names"]
    assert "lm_head.weight" not in plain
    for held in run.held("wrapped", moment):
        assert named(held) == plain


@pytest.mark.parametrize("world", [2, 4])
def test_fused_experts_go_out_one_by_one_unless_names_are_given(fsdp_runs, world):
    run = fsdp_runs[world]
    for rank in range(world):
        apart, fused = (named(run.held("experts", moment)[rank]) for moment in ("before", "as_they_are"))
        assert any(name.endswith(".gate_proj.weight") and "experts." in name for name in apart) == (
            rank < (3 if world == 4 else 2)
        )
        assert not any(name.endswith("gate_up_proj") for name in apart)
        assert set(fused) <= set(run.facts("experts")[0]["inside"])


def test_rename_gives_the_published_name_and_none_leaves_a_tensor_out(fsdp_runs):
    names = named(fsdp_runs[2].held("wrapped", "renamed")[0])
    assert len(names) == 9
    assert all(name.startswith("policy.model.layers.0.") for name in names)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("meta", "weight has no memory yet"),
        ("twice", "0.weight and 1.weight are both called weight"),
        ("other_torch", "use a torch this was run with"),
        ("strided", "weight: local memory with strides"),
        ("subclass", "weight is a Float8Tensor"),
    ],
)
def test_what_cannot_be_published_is_refused_by_name_with_the_way_out(fsdp_runs, case, says):
    assert says in fsdp_runs[2].facts("refused")[0][case]
