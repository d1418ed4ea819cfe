"""Plans of random layouts, carried out on byte arrays and compared with slicing the global tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_common.errors import ConfigError, CoverageError
from mx_common.refit.pieces import Pieces
from mx_common.refit.plan import CostModel, make_plan
from tests.support.refit_memory import ALWAYS_PULL, NEVER_PULL, Box, Engine, Trainer, check, check_whole_blocks, tensor


@st.composite
def partitions(draw: st.DrawFn, shape: Sequence[int]) -> list[Box]:
    """Boxes that tile the shape: cut in two, again and again, at random places."""
    boxes: list[Box] = [((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, 4))):
        start, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, n in enumerate(size) if n > 1]
        if not dims:
            boxes.append((start, size))
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, size[dim] - 1))
        boxes.append((start, (*size[:dim], at, *size[dim + 1 :])))
        boxes.append(((*start[:dim], start[dim] + at, *start[dim + 1 :]), (*size[:dim], size[dim] - at, *size[dim + 1 :])))
    return boxes


@st.composite
def cases(draw: st.DrawFn) -> tuple[Trainer, Engine]:
    tensors = {
        f"t{n}": tensor(draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)), draw(st.sampled_from([1, 2, 4])), seed=n)
        for n in range(draw(st.integers(1, 3)))
    }
    trainer, engine = Trainer(tensors, agents=4), Engine(tensors)
    for name, values in tensors.items():
        for start, size in draw(partitions(values.shape[:-1])):
            agents = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))
            rows = size[0] if size else 1
            blocks = draw(st.sampled_from([count for count in range(1, 9) if rows % count == 0]))
            trainer.hold(name, start, size, *agents, blocks=blocks)
    trainer.rows = draw(st.permutations(trainer.rows))
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.sampled_from(sorted(tensors)))
        shape, item = tensors[name].shape[:-1], tensors[name].shape[-1]
        start = [draw(st.integers(0, n - 1)) for n in shape]
        size = [draw(st.integers(0 if draw(st.booleans()) else 1, n - at)) for n, at in zip(shape, start, strict=True)]
        # the destination is a box inside a larger tensor whose dims may be in another order
        order = draw(st.permutations(range(len(shape))))
        frame = [n + draw(st.integers(0, 2)) for n in size]
        stride, step = [0] * len(shape), item
        for dim in reversed(order):
            stride[dim] = step
            step *= max(frame[dim], 1)
        engine.want(name, start, size, engine.room(step), stride)
    return trainer, engine


@settings(max_examples=300, deadline=None)
@given(cases(), st.sampled_from([CostModel(), NEVER_PULL, ALWAYS_PULL]), st.booleans(), st.sampled_from([1, 40, 1 << 20]))
def test_any_layout_arrives_byte_for_byte_and_nothing_else_is_written(
    case: tuple[Trainer, Engine], cost: CostModel, verify: bool, pull_bytes: int
) -> None:
    trainer, engine = case
    table = trainer.table()
    plan = make_plan(table, Pieces.of(engine.pieces), cost=cost, verify=verify, pull_bytes=pull_bytes)
    check(plan, trainer, engine)
    wanted = {
        (piece.name, *(a + i for a, i in zip(piece.start, index, strict=True)))
        for piece in engine.pieces
        for index in itertools.product(*map(range, piece.size))
    }
    assert plan.wire_bytes >= sum(trainer.tensors[str(element[0])].shape[-1] for element in wanted)
    if verify:
        check_whole_blocks(plan, table)
    elif cost is NEVER_PULL:
        assert not len(plan.pulls)
    elif cost is ALWAYS_PULL:
        assert (plan.reads.count == 1).all()
    biggest = np.maximum(pull_bytes, plan.pulls.nbytes // np.maximum(plan.pulls.blocks if verify else plan.pulls.rows, 1))
    assert (plan.pulls.nbytes <= biggest).all()


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_a_piece_that_loses_a_shard_is_refused_by_name_and_one_that_does_not_is_planned(
    case: tuple[Trainer, Engine], data: st.DataObject
) -> None:
    trainer, engine = case
    name, box, *_ = data.draw(st.sampled_from(trainer.rows))
    trainer.rows = [row for row in trainer.rows if row[:2] != (name, box)]
    hit = any(
        piece.name == name
        and all(max(a, b) < min(a + n, b + m) for a, n, b, m in zip(piece.start, piece.size, *box, strict=True))
        for piece in engine.pieces
    )
    if hit:
        with pytest.raises(CoverageError, match=rf"{name}\["):
            make_plan(trainer.table(), Pieces.of(engine.pieces))
    else:
        check(make_plan(trainer.table(), Pieces.of(engine.pieces)), trainer, engine)


@settings(max_examples=50, deadline=None)
@given(cases(), st.integers(1, 500))
def test_batches_are_all_pulls_in_order_and_never_more_than_the_staging(case: tuple[Trainer, Engine], staging: int) -> None:
    trainer, engine = case
    plan = make_plan(trainer.table(), Pieces.of(engine.pieces))
    if len(plan.pulls) and plan.pulls.nbytes.max() > staging:
        with pytest.raises(ConfigError, match="staging"):
            list(plan.batches(staging))
        return
    batches = list(plan.batches(staging))
    assert [pull for first, last in batches for pull in range(first, last)] == list(range(len(plan.pulls)))
    assert all(plan.pulls.nbytes[first:last].sum() <= staging for first, last in batches)
    rows = [row for first, last in batches for row in range(len(plan.copies))[plan.copies.rows_of(first, last)]]
    assert rows == list(range(len(plan.copies)))
