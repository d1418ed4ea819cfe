"""The digest sees every kind of damage, and is the same wherever it is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_common.load import digest
from mx_common.load.digest import ROW, byte_view, tensor_digest

SIZES = [1, 7, 8, ROW - 1, ROW, ROW + 1, 3 * ROW + 5, 100_000]


def random_bytes(size, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


@pytest.mark.parametrize("size", SIZES)
def test_int8_units_and_float32_units_give_the_same_value(size, monkeypatch):
    data = random_bytes(size)
    with_int8 = tensor_digest(data)
    monkeypatch.delattr(torch, "_int_mm")  # what a device without int8 matrix units has
    assert tensor_digest(data) == with_int8


def test_extreme_values_stay_exact_in_float32(monkeypatch):
    for value in (0, 127, 128, 255):
        data = torch.full((64 * ROW,), value, dtype=torch.uint8)
        exact = tensor_digest(data)
        with monkeypatch.context() as patch:
            patch.delattr(torch, "_int_mm")
            assert tensor_digest(data) == exact


def test_every_sum_of_a_row_is_below_the_integers_float32_can_hold():
    assert ROW * 128 * int(digest._weights("cpu", "int8").abs().max()) < 2**24


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 3 * ROW + 4), st.integers(0, 7))
def test_any_flipped_bit_changes_it(place, bit):
    data = random_bytes(3 * ROW + 5)
    before = tensor_digest(data)
    data[place] ^= 1 << bit
    assert tensor_digest(data) != before


@settings(max_examples=150, deadline=None)
@given(st.integers(0, ROW - 1), st.integers(0, ROW - 1))
def test_two_flipped_sign_bits_do_not_cancel(first, second):
    data = random_bytes(ROW)
    before = tensor_digest(data)
    data[first] ^= 0x80
    if first != second:
        data[second] ^= 0x80
    assert tensor_digest(data) != before


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 499), st.integers(0, 499), st.sampled_from([8, 64, 4096]))
def test_two_swapped_words_or_pages_change_it(first, second, length):
    data = random_bytes(500 * length)
    before = tensor_digest(data)
    a, b = (data[n * length : (n + 1) * length].clone() for n in (first, second))
    data[first * length : (first + 1) * length], data[second * length : (second + 1) * length] = b, a
    assert (tensor_digest(data) == before) == (first == second)


@pytest.mark.parametrize("length", [1, 8, 4096, 70_000])
def test_a_zeroed_or_stale_range_changes_it(length):
    data, stale = random_bytes(200_000), random_bytes(200_000, seed=1)
    before = tensor_digest(data)
    for source in (torch.zeros(length, dtype=torch.uint8), stale[50_000 : 50_000 + length]):
        torn = data.clone()
        torn[50_000 : 50_000 + length] = source
        assert tensor_digest(torn) != before


def test_zeros_of_different_lengths_differ():
    assert len({tensor_digest(torch.zeros(n, dtype=torch.uint8)) for n in SIZES}) == len(SIZES)


def test_no_two_positions_of_a_row_weigh_the_same_up_to_a_sign():
    rows = digest._weights("cpu", "int8").tolist()
    assert len({tuple(row) for row in rows} | {tuple(-w for w in row) for row in rows}) == 2 * ROW


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_it_is_of_the_bytes_whatever_the_dtype_and_shape(dtype):
    raw = random_bytes(4096) & 1
    assert tensor_digest(raw.view(dtype).view(4, -1)) == tensor_digest(raw)


def test_a_transposed_weight_is_digested_in_memory_order():
    weight = torch.randn(100, 64)
    assert tensor_digest(weight.t()) == tensor_digest(weight)
    assert byte_view(weight.t()).data_ptr() == weight.data_ptr()


def test_a_tensor_with_gaps_is_refused_with_its_shape():
    with pytest.raises(ValueError, match=r"shape \(10, 5\) and strides \(10, 1\) has gaps"):
        tensor_digest(torch.zeros(10, 10)[:, :5])


def test_a_scalar_has_a_digest():
    assert tensor_digest(torch.tensor(1.0)) != tensor_digest(torch.tensor(2.0))


def test_the_value_is_fixed_for_good():
    assert tensor_digest(torch.arange(5000, dtype=torch.int32)) == 3266947417968565046
