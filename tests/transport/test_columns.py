"""Columns against a model that knows single bytes only."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx_common.errors import ConfigError, MxError
from mx_common.transport import Reads, Regions, WireResult

ranges = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(0, 2)), max_size=12)
copies = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 9), st.integers(0, 1), st.integers(0, 1)), max_size=12
)


def regions_from(rows: list[tuple[int, int, int]]) -> Regions:
    columns = np.array(rows, dtype=np.uint64).reshape(-1, 3)
    return Regions(columns[:, 0], columns[:, 1], columns[:, 2])


def reads_from(rows: list[tuple[int, int, int, int, int]]) -> Reads:
    c = np.array(rows, dtype=np.uint64).reshape(-1, 5)
    return Reads(c[:, 0], c[:, 1], c[:, 2], c[:, 3], c[:, 4])


def bytes_of(regions: Regions) -> set[tuple[int, int]]:
    return {(d, a + i) for a, n, d in regions.rows().tolist() for i in range(n)}


def copied_bytes(reads: Reads) -> Counter[tuple[int, int, int, int]]:
    """Every (remote device, remote byte, local device, local byte) with how often it is copied."""
    return Counter(
        (rd, remote + i, ld, local + i)
        for (remote, n, rd), (local, _, ld) in zip(reads.remote_rows().tolist(), reads.local_rows().tolist(), strict=True)
        for i in range(n)
    )


@given(ranges)
def test_merged_regions_hold_the_same_bytes_in_as_few_ranges_as_possible(rows: list[tuple[int, int, int]]) -> None:
    regions = regions_from(rows)
    merged = regions.merged()
    held = bytes_of(regions)
    assert bytes_of(merged) == held
    assert merged.total_bytes == len(held)
    assert len(merged) == sum((device, byte - 1) not in held for device, byte in held)
    assert merged.rows().tolist() == sorted(merged.rows().tolist(), key=lambda row: (row[2], row[0]))


@given(ranges, ranges)
def test_a_range_is_covered_exactly_when_each_of_its_bytes_is(
    rows: list[tuple[int, int, int]], asked: list[tuple[int, int, int]]
) -> None:
    regions, questions = regions_from(rows), regions_from(asked)
    held = bytes_of(regions)
    expected = [all((d, a + i) in held for i in range(n)) for a, n, d in asked]
    assert regions.covers(questions.addr, questions.length, questions.device).tolist() == expected


@given(copies)
def test_coalesced_reads_copy_the_same_bytes_to_the_same_places(rows: list[tuple[int, int, int, int, int]]) -> None:
    reads = reads_from(rows)
    joined = reads.coalesced()
    assert copied_bytes(joined) == copied_bytes(reads)
    assert joined.total_bytes == reads.total_bytes
    assert len(joined) <= len(reads)


@given(copies.map(lambda rows: [(r, 100 * i + 1, n, rd, ld) for i, (r, _, n, rd, ld) in enumerate(rows)]), st.integers(1, 5))
def test_no_two_coalesced_reads_are_adjacent_on_both_sides(rows: list[tuple[int, int, int, int, int]], step: int) -> None:
    # each read is also cut into pieces of `step` bytes and shuffled, which coalescing must undo
    cut = [(r + i, a + i, min(step, n - i), rd, ld) for r, a, n, rd, ld in rows for i in range(0, n, step)]
    joined = reads_from(cut[::-1]).coalesced()
    starts = {
        (r, rd, a, ld)
        for (r, _, rd), (a, _, ld) in zip(joined.remote_rows().tolist(), joined.local_rows().tolist(), strict=True)
    }
    ends = {
        (r + n, rd, a + n, ld)
        for (r, n, rd), (a, _, ld) in zip(joined.remote_rows().tolist(), joined.local_rows().tolist(), strict=True)
    }
    assert not starts & ends
    assert len(joined) == len(rows)


@given(copies.filter(bool), st.data())
def test_windows_laid_end_to_end_are_the_whole(rows: list[tuple[int, int, int, int, int]], data: st.DataObject) -> None:
    reads = reads_from(rows)
    size = data.draw(st.integers(1, reads.total_bytes + 3))
    parts = [reads.window(at, min(at + size, reads.total_bytes)) for at in range(0, reads.total_bytes, size)]
    assert all(part.total_bytes <= size for part in parts)
    assert sum((copied_bytes(part) for part in parts), Counter()) == copied_bytes(reads)


def test_adjacency_on_one_side_only_is_not_joined() -> None:
    assert len(Reads([100, 110], [500, 600], [10, 10], [0, 0], [0, 0]).coalesced()) == 2
    assert len(Reads([100, 200], [500, 510], [10, 10], [0, 0], [0, 0]).coalesced()) == 2
    assert len(Reads([100, 110], [500, 510], [10, 10], [0, 1], [0, 0]).coalesced()) == 2
    assert len(Reads([100, 110], [500, 510], [10, 10], [0, 0], [0, 0]).coalesced()) == 1


def test_columns_cannot_be_changed_through_the_callers_array() -> None:
    addr = np.array([64], dtype=np.uint64)
    regions = Regions(addr, np.array([8], dtype=np.uint64), np.array([0], dtype=np.uint64))
    addr[0] = 1
    assert regions.addr.tolist() == [64]
    with pytest.raises(ValueError, match="read-only"):
        regions.addr[0] = 1


@pytest.mark.parametrize(
    ("addr", "length", "device", "mem", "says"),
    [
        ([64, 128], [8], [0, 0], "DRAM", "different lengths"),
        ([64], [0], [0], "DRAM", "is empty"),
        ([0], [8], [0], "DRAM", "starts at address 0"),
        ([2**64 - 4], [8], [0], "DRAM", "past the end"),
        ([64], [8], [-1], "DRAM", "host memory is device 0"),
        ([[64]], [8], [0], "DRAM", "1-D"),
        ([64.0], [8], [0], "DRAM", "whole numbers"),
        ([64], [8], [0], "HBM", "DRAM, VRAM"),
    ],
)
def test_regions_that_cannot_be_right_are_refused_with_the_reason(
    addr: object, length: object, device: object, mem: str, says: str
) -> None:
    dtype = {} if any(isinstance(v, float | list) or v < 2**63 for v in addr) else {"dtype": np.uint64}  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=says):
        Regions(np.array(addr, **dtype), length, device, mem)  # type: ignore[arg-type, call-overload]


def test_reads_of_unequal_lengths_are_refused_before_any_transport_sees_them() -> None:
    with pytest.raises(MxError, match="remote_addr 1, local_addr 1, length 2"):
        Reads([64], [64], [8, 8], [0], [0])


@pytest.mark.parametrize("figures", [(-1, 1.0, 1), (1, float("nan"), 1), (1, -1.0, 1), (1, 1.0, -1)])
def test_a_result_with_impossible_figures_is_refused(figures: tuple[int, float, int]) -> None:
    with pytest.raises(ConfigError, match="cannot report"):
        WireResult(*figures, "ucx")
