"""What a loader does is learned from the loader: loaders in vLLM's manner, on meta tensors, against the same loaders really run."""

from __future__ import annotations

import pytest
import torch

from mx_common.refit.capture import capture
from tests.support.capture_check import Model, check, f32, on_meta

# Tensor parallel rank 1 of 2, hidden 8, 4 heads and 2 key-value heads of 4.


def qkv(params, name, weight):
    part = {"q": (0, 8), "k": (8, 4), "v": (12, 4)}[name]
    params["qkv"].data.narrow(0, *part).copy_(weight.narrow(0, part[1], part[1]))


def gate_up(params, name, weight):
    half = params["gate_up"].data.chunk(2, dim=0)[{"gate": 0, "up": 1}[name]]
    half.copy_(weight.chunk(2, dim=0)[1])


def experts(params, name, weight):
    number, which = name.split(".")
    expert = params["w13"].data[int(number)]
    expert.narrow(0, {"gate": 0, "up": 6}[which], 6).copy_(weight.narrow(0, 6, 6))


def stacked(params, name, weight):
    for expert, one in enumerate(weight.unbind(0)):
        params["w2"].data[expert].copy_(one.t())


LOADERS = {
    "fused qkv by narrow": (qkv, {"qkv": f32(16, 8)}, {"q": f32(16, 8), "k": f32(8, 8), "v": f32(8, 8)}, 3),
    "gate and up by chunk": (gate_up, {"gate_up": f32(12, 8)}, {"gate": f32(12, 8), "up": f32(12, 8)}, 2),
    "a transpose": (lambda p, n, w: p["w"].data.copy_(w.t()), {"w": f32(6, 4)}, {"a": f32(4, 6)}, 1),
    "a slice of columns": (lambda p, n, w: p["w"].data.copy_(w[:, 3:6]), {"w": f32(4, 3)}, {"a": f32(4, 6)}, 1),
    "experts of a stacked parameter": (
        experts,
        {"w13": f32(3, 12, 4)},
        {f"{e}.{n}": f32(12, 4) for e in range(3) for n in ("gate", "up")},
        6,
    ),
    "a stacked tensor into transposed experts": (stacked, {"w2": f32(3, 4, 5)}, {"a": f32(3, 5, 4)}, 3),
    "split": (
        lambda p, n, w: [p[k].data.copy_(s) for k, s in zip("abc", w.split([3, 2, 1]), strict=True)],
        {"a": f32(3, 4), "b": f32(2, 4), "c": f32(1, 4)},
        {"fused": f32(6, 4)},
        3,
    ),
    "a reshape that stays a view": (
        lambda p, n, w: p["w"].data.copy_(w.view(2, 3, 4)[1]),
        {"w": f32(3, 4)},
        {"a": f32(6, 4)},
        1,
    ),
    "a merge of full dims": (lambda p, n, w: p["w"].data.copy_(w.flatten(0, 1)), {"w": f32(6, 4)}, {"a": f32(2, 3, 4)}, 1),
    "a convolution kernel flattened": (
        lambda p, n, w: p["w"].data.copy_(w.view(5, -1)),
        {"w": f32(5, 12)},
        {"a": f32(5, 3, 2, 2)},
        1,
    ),
    "interleaved heads": (
        lambda p, n, w: p["q"].data.view(3, 2, 4).copy_(w.view(3, 3, 2, 4)[:, 1]),
        {"q": f32(6, 4)},
        {"qkv": f32(18, 4)},
        3,
    ),
    "every second row": (lambda p, n, w: p["w"].data.copy_(w[1::2]), {"w": f32(3, 4)}, {"a": f32(6, 4)}, 3),
    "a scalar": (lambda p, n, w: p["s"].data.copy_(w), {"s": f32()}, {"a": f32()}, 1),
    "one of three scales": (lambda p, n, w: p["s"].data[2].copy_(w.reshape(())), {"s": f32(3)}, {"a": f32(1)}, 1),
    "bits seen as bytes": (
        lambda p, n, w: p["w"].data.view(torch.uint8).copy_(w.view(torch.uint8)),
        {"w": ((4, 4), torch.float8_e4m3fn)},
        {"a": ((4, 4), torch.float8_e4m3fn)},
        1,
    ),
    "foreach copy": (lambda p, n, w: torch._foreach_copy_([p["w"].data], [w.t()]), {"w": f32(3, 4)}, {"a": f32(4, 3)}, 1),
}


@pytest.mark.parametrize("case", LOADERS)
def test_a_copy_between_views_becomes_pieces_that_write_what_the_loader_writes(case):
    load, params, facts, count = LOADERS[case]
    captured = check(lambda: Model(load, **params), facts)
    assert not captured.whole, captured.reasons
    assert len(captured.pieces) == count
    assert not captured.unused
    missing = {name: n for name, n in captured.uncovered.items() if case != "one of three scales"}
    assert not missing


def test_a_piece_says_box_and_strides_in_the_checkpoint_tensors_dims():
    captured = check(lambda: Model(lambda p, n, w: p["w"].data[1].copy_(w[2:4].t()), w=f32(2, 6, 2)), {"a": f32(5, 6)})
    (piece,) = captured.pieces
    assert (piece.tensor, piece.start, piece.size) == ("a", (2, 0), (2, 6))
    assert (piece.param, piece.offset, piece.stride) == ("w", 48, (4, 8))


def computed(params, name, weight):
    params["w"].data.copy_(weight * 2)


def gathered():
    held = {}

    def load(params, name, weight):
        held[name] = weight
        if len(held) == 2:
            params["w"].data.copy_(torch.cat([held.pop("a"), held.pop("b")]))

    return load


def masked(params, name, weight):
    params["w"].data[torch.ones(4, dtype=torch.bool, device=weight.device)] = weight


def in_place(params, name, weight):
    params["w"].data.copy_(weight)
    params["w"].data.neg_()


def by_value(params, name, weight):
    if weight[0, 0].item() != 0.5:
        params["w"].data.copy_(weight)


def diagonal(params, name, weight):
    params["w"].data.copy_(weight.diagonal())


WHOLE = {
    "arithmetic": (computed, {"w": f32(4, 3)}, {"a": f32(4, 3)}),
    "a cast of its own": (lambda p, n, w: p["w"].data.copy_(w.to(torch.bfloat16)), {"w": f32(4, 3)}, {"a": f32(4, 3)}),
    "a clone": (lambda p, n, w: p["w"].data.copy_(w.t().contiguous()), {"w": f32(3, 4)}, {"a": f32(4, 3)}),
    "a broadcast": (lambda p, n, w: p["w"].data.copy_(w), {"w": f32(4, 3)}, {"a": f32(3)}),
    "a broadcast that adds no dim": (lambda p, n, w: p["w"].data.copy_(w), {"w": f32(4, 3)}, {"a": f32(4, 1)}),
    "a mask": (masked, {"w": f32(4, 3)}, {"a": f32(4, 3)}),
    "an operation in place afterwards": (in_place, {"w": f32(4, 3)}, {"a": f32(4, 3)}),
    "a value": (by_value, {"w": f32(4, 3)}, {"a": f32(4, 3)}),
    "a diagonal": (diagonal, {"w": f32(4)}, {"a": f32(4, 4)}),
    "other bits": (lambda p, n, w: p["w"].data.copy_(w.view(torch.int32)), {"w": f32(4, 3)}, {"a": f32(4, 3)}),
    "half a run of rows": (lambda p, n, w: p["w"].data.copy_(w.view(-1)[2:10]), {"w": f32(8)}, {"a": f32(3, 4)}),
}


@pytest.mark.parametrize("case", WHOLE)
def test_what_is_no_copy_of_a_view_is_left_to_the_loader(case):
    load, params, facts = WHOLE[case]
    captured = check(lambda: Model(load, **params), facts)
    assert captured.whole == tuple(facts)
    assert not captured.pieces
    assert set(captured.reasons) == set(facts)
    assert captured.failed == (("a",) if case == "a value" else ())


def test_all_tensors_of_a_concatenation_are_whole_and_their_parameter_is_covered():
    captured = check(lambda: Model(gathered(), w=f32(6, 2)), {"a": f32(2, 2), "b": f32(4, 2)})
    assert captured.whole == ("a", "b")
    assert not captured.uncovered


def test_a_tensor_of_another_dtype_is_a_piece_with_both():
    captured = check(lambda: Model(lambda p, n, w: p["w"].data.copy_(w[2:]), w=((2, 3), torch.bfloat16)), {"a": f32(4, 3)})
    (piece,) = captured.pieces
    assert (piece.src_dtype, piece.dst_dtype) == (torch.float32, torch.bfloat16)
    assert (piece.start, piece.size, piece.stride) == ((2, 0), (2, 3), (6, 2))


def by_name(params, name, weight):
    if name in params:
        params[name].data.copy_(weight)


def tied():
    model = Model(by_name, embed=f32(6, 4), norm=f32(4))
    model.head = model.embed
    return model


def test_tied_parameters_are_written_once_and_both_are_covered():
    model = tied()
    captured = capture(model.load_weights, on_meta(model.tensors()) and model.tensors(), {"embed": f32(6, 4), "norm": f32(4)})
    assert [(piece.tensor, piece.param) for piece in captured.pieces] == [("embed", "embed"), ("norm", "norm")]
    assert not captured.uncovered


def test_of_two_tensors_for_the_same_bytes_the_later_one_is_read_and_that_is_said():
    model = tied()
    captured = capture(model.load_weights, model.tensors(), {"embed": f32(6, 4), "head": f32(6, 4), "norm": f32(4)})
    assert [piece.tensor for piece in captured.pieces] == ["head", "norm"]
    assert captured.unused == ("embed",)
    assert captured.overlaps == (("embed", "embed", "head"),)


def test_tensors_that_overlap_in_part_are_left_to_the_loader_in_its_order():
    def load(params, name, weight):
        params["w"].data.narrow(0, {"a": 0, "b": 2}[name], 4).copy_(weight)

    captured = check(lambda: Model(load, w=f32(6, 2)), {"a": f32(4, 2), "b": f32(4, 2)})
    assert captured.whole == ("a", "b")


def test_views_of_one_memory_are_one_parameter():
    whole = torch.zeros(8, 4)
    params = {"top": whole[:3], "all": whole, "rest": whole[3:]}

    def load(weights):
        for name, weight in weights:
            params[name].copy_(weight)

    captured = capture(load, params, {"top": f32(3, 4)})
    assert [(piece.param, piece.offset) for piece in captured.pieces] == [("all", 0)]
    assert captured.uncovered == {"all": 5 * 16, "rest": 5 * 16}
    parts = {"b": whole[4:], "a": whole[:4]}
    captured = capture(lambda weights: [parts[name].copy_(weight) for name, weight in weights], parts, {"b": f32(4, 4)})
    assert [(piece.param, piece.offset) for piece in captured.pieces] == [("b", 0)]
    assert captured.uncovered == {"a": 64}


def test_tensors_the_loader_ignores_and_bytes_nothing_writes_are_named():
    make = lambda: Model(by_name, buffers=("cache",), w=f32(4, 3), cache=f32(5))  # noqa: E731
    captured = check(make, {"w": f32(4, 3), "rotary.inv_freq": f32(2), "mtp.head": f32(3, 3)})
    assert captured.unused == ("rotary.inv_freq", "mtp.head")
    assert captured.uncovered == {"cache": 20}
    assert not captured.reasons


def test_padding_the_loader_fills_by_itself_is_covered_and_said():
    def load(params, name, weight):
        params["w"].data[: len(weight)].copy_(weight)
        params["w"].data[len(weight) :].fill_(0)

    captured = check(lambda: Model(load, w=f32(8, 3)), {"a": f32(5, 3)})
    assert [piece.size for piece in captured.pieces] == [(5, 3)]
    assert captured.constant == {"w": 36}
    assert not captured.uncovered


def test_a_constant_over_a_copy_leaves_the_tensor_to_the_loader():
    def load(params, name, weight):
        params["w"].data.copy_(weight)
        params["w"].data[0].zero_()

    assert check(lambda: Model(load, w=f32(4, 3)), {"a": f32(4, 3)}).whole == ("a",)


def test_a_tensor_the_loader_keeps_is_not_called_unused():
    kept = []
    captured = capture(lambda weights: kept.extend(w[1:] for n, w in weights if n == "a"), {}, {"a": f32(3), "b": f32(3)})
    assert captured.whole == ("a",)
    assert captured.unused == ("b",)


def test_a_parameter_whose_memory_is_exchanged_belongs_to_the_loader():
    param = torch.empty(3, device="meta")

    def load(weights):
        for _, weight in weights:
            param.data = weight

    captured = capture(load, {"w": param}, {"a": f32(3)})
    assert captured.whole == ("a",)
    assert not captured.uncovered


def test_real_parameters_are_read_and_never_written():
    model = Model(by_name, w=f32(4, 3), other=f32(4, 3))
    before = {name: (t.clone(), t.data_ptr()) for name, t in model.tensors().items()}

    def load(weights):
        for name, weight in weights:
            if int(model.w.sum()) == 0:  # a loader may look at what is real, as at a map of experts
                model.load(model.tensors(), name, weight)
        model.other.data.fill_(3)

    captured = capture(load, model.tensors(), {"w": f32(4, 3)})
    assert [piece.param for piece in captured.pieces] == ["w"]
    for name, (content, address) in before.items():
        assert torch.equal(model.tensors()[name], content)
        assert model.tensors()[name].data_ptr() == address


def test_a_shape_that_does_not_fit_is_refused_as_in_earnest():
    for param in (torch.zeros(4, 3), torch.empty(4, 3, device="meta")):
        captured = capture(lambda weights, to=param: [to.copy_(w) for _, w in weights], {"w": param}, {"a": f32(3, 4)})
        assert captured.failed == ("a",)


def test_a_loader_that_fails_for_one_tensor_is_run_again_without_it():
    facts = {f"layers.{n}.{kind}": f32(4, 3) for n in range(40) for kind in ("weight", "scale")}
    runs = []

    def load(weights):
        runs.append(0)
        for name, weight in weights:
            if name.endswith("scale"):
                weight[0, 0].item()
            params[name].copy_(weight)

    params = {name: torch.empty(4, 3, device="meta") for name in facts}
    captured = capture(load, params, facts)
    assert captured.whole == tuple(name for name in facts if name.endswith("scale"))
    assert len(captured.pieces) == 40
    assert len(runs) <= 5
    assert "item" in captured.reasons["layers.7.scale"]


def test_a_loader_that_takes_all_tensors_first_is_blamed_for_the_one_it_stumbles_over():
    params = {name: torch.empty(3, device="meta") for name in "abc"}

    def load(weights):
        for name, weight in list(weights):
            if name == "b":
                weight.sum().item()
            params[name].copy_(weight)

    captured = capture(load, params, {name: f32(3) for name in "abc"})
    assert captured.whole == ("b",)
    assert [piece.tensor for piece in captured.pieces] == ["a", "c"]


def test_a_loader_that_fails_whatever_it_is_given_has_everything_whole():
    def load(weights):
        for _ in weights:
            pass
        raise ValueError("not all weights were initialized")

    captured = capture(load, {"w": torch.empty(3, device="meta")}, {"a": f32(3), "b": f32(3)})
    assert captured.whole == captured.failed == ("a", "b")
    assert captured.uncovered == {"w": 12}
    assert "not all weights were initialized" in captured.reasons["a"]


def test_a_tensor_moved_to_the_loader_takes_what_is_written_over_it_along():
    model = tied()
    captured = capture(model.load_weights, model.tensors(), {"embed": f32(6, 4), "head": f32(6, 4), "norm": f32(4)})
    facts = {"embed": f32(6, 4), "head": f32(6, 4), "norm": f32(4)}
    moved = captured.left_to_loader({"embed": "its layer is repacked"})
    assert moved.minimum_bytes(facts) == captured.minimum_bytes(facts) == 6 * 4 * 4 + 4 * 4, (
        "head is all that serves of the two"
    )
    assert moved.whole == ("embed", "head")
    assert [piece.tensor for piece in moved.pieces] == ["norm"]
    assert moved.reasons["embed"] == "its layer is repacked"


def test_each_of_ten_thousand_expert_tensors_gets_its_place():
    count = 2500
    params = {f"{layer}.w13": torch.empty(count, 6, 4, device="meta") for layer in range(2)}
    facts = {f"{layer}.{e}.{kind}": f32(6, 4) for layer in range(2) for e in range(count) for kind in ("gate", "up")}

    def load(weights):
        for name, weight in weights:
            layer, expert, kind = name.split(".")
            params[f"{layer}.w13"][int(expert)].narrow(0, {"gate": 0, "up": 3}[kind], 3).copy_(weight.narrow(0, 3, 3))

    captured = capture(load, params, facts)
    assert [piece.tensor for piece in captured.pieces] == list(facts)
    assert [piece.offset for piece in captured.pieces] == [48 * at for at in range(2 * count)] * 2
    assert {(piece.start, piece.size, piece.stride) for piece in captured.pieces} == {((3, 0), (3, 4), (16, 4))}
    assert not captured.uncovered
