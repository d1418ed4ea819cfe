"""What `ShardTable.check` finds: gaps and overlaps by name, and nothing where tensors are cut up whole."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mx_common.errors import CoverageError, ManifestMismatch
from mx_common.refit._boxes import overlapping, uncovered
from tests.support.shard_tables import make, rows_of, two_by_rows, whole_tables


def same_box(table, start, row):
    """Which shards are the same box of the same tensor as shard `row`."""
    return (table.tensor == table.tensor[row]) & (start == start[row]).all(1) & (table.size == table.size[row]).all(1)


class TestCheck:
    @settings(deadline=None)
    @given(whole_tables())
    def test_any_way_of_cutting_tensors_up_with_replicas_passes(self, table):
        table.check()

    @settings(deadline=None)
    @given(whole_tables(held=True), st.data())
    def test_a_missing_box_is_a_gap_of_a_named_tensor(self, table, data):
        row = data.draw(st.integers(0, len(table) - 1))
        with pytest.raises(CoverageError) as caught:
            rows_of(table, ~same_box(table, table.start, row)).check()
        assert str(caught.value).startswith(table.names[table.tensor[row]] + " [")

    @settings(deadline=None)
    @given(whole_tables(held=True), st.data())
    def test_a_shifted_box_overlaps_its_neighbours_by_name(self, table, data):
        room = table.shape[table.tensor] - table.size
        back, forth = np.argwhere(table.start > 0), np.argwhere(table.start < room)
        moves = [(*at, -1) for at in back.tolist()] + [(*at, 1) for at in forth.tolist()]
        assume(moves)
        row, dim, step = data.draw(st.sampled_from(moves))
        start = table.start.copy()
        start[row, dim] += step
        assume(same_box(table, start, row).sum() == 1)  # more: it became a replica of another
        with pytest.raises(ManifestMismatch) as caught:
            dataclasses.replace(table, start=start).check()
        assert str(caught.value).startswith(table.names[table.tensor[row]] + ": [")
        assert "overlap in part" in str(caught.value)

    def test_the_gap_and_the_overlap_are_told_with_box_and_slots(self):
        with pytest.raises(CoverageError, match=r"^w \[8, 4\]: nobody holds the box \[4:8, 0:4\]; publishing slots: tp0, tp1$"):
            rows_of(two_by_rows(), [0]).check()
        with pytest.raises(ManifestMismatch, match=r"^w: \[0:4, 0:4\] of tp0 and \[3:7, 0:4\] of tp1 overlap in part"):
            two_by_rows(start=[[0, 0], [3, 0]]).check()

    def test_tensors_that_nobody_holds_are_counted(self):
        table = make({"a": ("bfloat16", (2,)), "b": ("bfloat16", ()), "none": ("bfloat16", (0, 3))}, [])
        with pytest.raises(CoverageError, match=r"^a \[2\]: nobody holds the box \[0:2\], and 1 more tensors have gaps"):
            table.check()

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 1), *[st.tuples(st.integers(0, 4), st.integers(1, 3))] * 3), max_size=8))
    def test_the_sweep_finds_an_overlap_when_comparing_all_pairs_does(self, boxes):
        tensor = np.array([box[0] for box in boxes], dtype=np.int32)
        bounds = np.array([box[1:] for box in boxes], dtype=np.int64).reshape(len(boxes), 3, 2)
        start, size = bounds[:, :, 0], bounds[:, :, 1]

        def meet(a, b):
            return tensor[a] == tensor[b] and all(start[a] < start[b] + size[b]) and all(start[b] < start[a] + size[a])

        found = overlapping(tensor, start, size)
        pairs = [pair for pair in itertools.combinations(range(len(boxes)), 2) if meet(*pair)]
        assert (found is not None) == bool(pairs)
        assert found is None or tuple(sorted(found)) in pairs

    @given(st.lists(st.tuples(*[st.tuples(st.integers(0, 3), st.integers(1, 3))] * 2), max_size=6))
    def test_an_uncovered_box_is_free_and_there_is_one_unless_all_is_covered(self, boxes):
        taken = np.zeros((6, 6), dtype=bool)
        for (row, rows), (column, columns) in boxes:
            taken[row : row + rows, column : column + columns] = True
        free = uncovered((6, 6), [[a for a, _ in box] for box in boxes], [[n for _, n in box] for box in boxes])
        assert (free is None) == bool(taken.all())
        assert free is None or not taken[tuple(slice(low, high) for low, high in free)].any()
