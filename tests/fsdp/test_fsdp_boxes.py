"""Boxes from facts: against torch's own arithmetic, and as a partition of every tensor."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from mx_common.errors import ConfigError
from mx_fsdp.boxes import LocalBox, LocalLayout, local_layout


@st.composite
def facts(draw):
    """A shape, a mesh and placements as FSDP, HSDP, tensor parallelism and their combinations make them."""
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    kinds = st.one_of(
        st.just(Replicate()),
        dims.map(Shard),
        st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(2, 3)),
    )
    return shape, mesh, tuple(draw(kinds) for _ in mesh)


@given(facts())
@settings(max_examples=150, deadline=None)
def test_every_replica_group_holds_every_element_once(given):
    shape, mesh, placements = given
    covered = {}
    for coordinate in itertools.product(*map(range, mesh)):
        layout = local_layout(shape, mesh, coordinate, placements)
        count = covered.setdefault(layout.replica, np.zeros(shape, dtype=int))
        local = np.zeros(layout.size, dtype=int)
        for box in layout.boxes:
            count[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))] += 1
            local[tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))] += 1
        assert (local == 1).all()  # and every element of the local tensor is in one box
    replicas = int(np.prod([n for n, p in zip(mesh, placements, strict=True) if p.is_replicate()], dtype=int))
    assert sorted(covered) == list(range(replicas))
    assert all((count == 1).all() for count in covered.values())


@given(facts())
@settings(max_examples=150, deadline=None)
def test_size_and_first_element_are_those_torch_computes(given):
    shape, mesh, placements = given
    for coordinate in itertools.product(*map(range, mesh)):
        size, offset = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
        layout = local_layout(shape, mesh, coordinate, placements)
        assert layout.size == tuple(size)
        if layout.boxes:
            assert layout.boxes[0].start == tuple(offset)


def box(start, size, offset=None):
    return LocalBox(start, size, offset or (0,) * len(start))


@pytest.mark.parametrize(
    ("shape", "mesh", "coordinate", "placements", "layout"),
    [
        ((251, 4), (2,), (0,), [Shard(0)], LocalLayout(0, (126, 4), (box((0, 0), (126, 4)),))),
        ((251, 4), (2,), (1,), [Shard(0)], LocalLayout(0, (125, 4), (box((126, 0), (125, 4)),))),
        ((3,), (4,), (3,), [Shard(0)], LocalLayout(0, (0,), ())),
        ((4, 8), (2,), (1,), [Shard(1)], LocalLayout(0, (4, 4), (box((0, 4), (4, 4)),))),
        ((8,), (2, 2), (1, 0), [Replicate(), Shard(0)], LocalLayout(1, (4,), (box((0,), (4,)),))),
        # FSDP over the halves that tensor parallelism made: [0 1 | 2 3] and [4 5 | 6 7]
        ((8,), (2, 2), (1, 1), [_StridedShard(0, split_factor=2), Shard(0)], LocalLayout(0, (2,), (box((6,), (2,)),))),
        # not followed by the shard that undoes it: two ranges, one after the other in memory
        ((8,), (2,), (1,), [_StridedShard(0, split_factor=2)], LocalLayout(0, (4,), (box((2,), (2,)), box((6,), (2,), (2,))))),
    ],
)
def test_layouts_that_one_can_check_by_hand(shape, mesh, coordinate, placements, layout):
    assert local_layout(shape, mesh, coordinate, placements) == layout


def test_a_partial_sum_is_refused_because_nobody_holds_the_values():
    with pytest.raises(ConfigError, match="redistribute"):
        local_layout((4,), (2,), (0,), [Partial()])
