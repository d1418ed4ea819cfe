"""Whatever views a loader takes of a checkpoint's tensors, what was captured leaves what it leaves."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.capture_check import Model, check, f32


@st.composite
def chains(draw):
    """A random tensor shape and steps that keep a view of it, as (operation, arguments)."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    view, steps = torch.empty(shape, device="meta"), []
    for _ in range(draw(st.integers(0, 5))):
        if not view.dim():
            break
        dim = draw(st.integers(0, view.dim() - 1))
        side = view.shape[dim]
        kind = draw(st.sampled_from(["narrow", "chunk", "transpose", "select", "flatten", "unflatten", "step"]))
        if kind == "narrow":
            start = draw(st.integers(0, side - 1))
            step = ("narrow", (dim, start, draw(st.integers(1, side - start))))
        elif kind == "chunk" and side > 1:
            step = ("narrow", (dim, side // 2, side - side // 2))
        elif kind == "transpose":
            step = ("transpose", (dim, draw(st.integers(0, view.dim() - 1))))
        elif kind == "select":
            step = ("select", (dim, draw(st.integers(0, side - 1))))
        elif kind == "flatten":
            step = ("flatten", (dim, draw(st.integers(dim, view.dim() - 1))))
        elif kind == "unflatten" and side > 1:
            by = draw(st.sampled_from([n for n in range(1, side + 1) if side % n == 0]))
            step = ("unflatten", (dim, (by, side // by)))
        elif kind == "step":
            step = (
                "__getitem__",
                ((slice(None),) * dim + (slice(draw(st.integers(0, side - 1)), None, draw(st.integers(1, 3))),),),
            )
        else:
            continue
        name, args = step
        view = getattr(view, name)(*args)
        steps.append(step)
    return shape, steps


def walk(tensor, steps):
    for name, args in steps:
        tensor = getattr(tensor, name)(*args)
    return tensor


@settings(max_examples=300, deadline=None)
@given(chains(), st.randoms(use_true_random=False))
def test_whatever_views_a_loader_takes_pieces_and_whole_tensors_leave_what_it_leaves(chain, random):
    shape, steps = chain
    taken = walk(torch.empty(shape, device="meta"), steps).shape
    order = list(range(len(taken)))
    random.shuffle(order)
    margin = [random.randint(0, 2) for _ in taken]

    def load(params, name, weight):
        into = params["w"].data
        for dim, side in enumerate(order):
            into = into.narrow(dim, margin[dim], taken[side])
        back = [order.index(dim) for dim in range(len(order))]
        into.permute(back).copy_(walk(weight, steps))

    padded = tuple(taken[side] + 2 * margin[dim] for dim, side in enumerate(order))
    captured = check(lambda: Model(load, w=f32(*padded)), {"a": f32(*shape)})
    assert bool(captured.pieces) != bool(captured.whole)
    viewed = walk(torch.empty(shape), steps)._base is not None or not steps
    if viewed and not any(name in ("__getitem__", "flatten", "unflatten") for name, _ in steps):
        assert len(captured.pieces) == 1
