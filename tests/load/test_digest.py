"""The digest sees every kind of damage, and is the same wherever it is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_common.load import digest
from mx_common.load.digest import ROW, block_digests, byte_view, tensor_digest, tensor_digests

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


LENGTHS = st.sampled_from([0, 1, 576, ROW - 1, ROW, ROW + 1, 2 * ROW, 3 * ROW + 5, 40 * ROW])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0, 1, 576, ROW, 2 * ROW, 33 * ROW]), LENGTHS), max_size=8), st.randoms())
def test_tensors_that_lie_side_by_side_are_digested_as_if_alone(gaps_and_lengths, order):
    area = random_bytes(sum(gap + length for gap, length in gaps_and_lengths))
    tensors, place = [], 0
    for gap, length in gaps_and_lengths:
        tensors.append(area[place + gap : place + gap + length])
        place += gap + length
    tensors += [random_bytes(3 * ROW), area]  # of another allocation; all of them once more
    order.shuffle(tensors)
    assert list(tensor_digests(tensors)) == [tensor_digest(tensor.clone()) for tensor in tensors]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.sampled_from([0, 1, 700, ROW, 2 * ROW + 3, 5 * ROW])), max_size=6))
def test_a_block_is_digested_as_if_it_were_a_tensor_of_its_own(blocks_and_lengths):
    area = random_bytes(sum(blocks * length for blocks, length in blocks_and_lengths))
    tensors = list(area.split([blocks * length for blocks, length in blocks_and_lengths]))
    found = block_digests(tensors, [blocks for blocks, _ in blocks_and_lengths])
    for tensor, (blocks, _), digests in zip(tensors, blocks_and_lengths, found, strict=True):
        assert digests.dtype == np.uint64
        assert digests.tolist() == [tensor_digest(part.clone()) for part in tensor.view(blocks, -1)]


@pytest.mark.parametrize("blocks", [0, 3, 8])
def test_blocks_that_do_not_divide_the_bytes_are_refused(blocks):
    with pytest.raises(ValueError, match=f"100 bytes do not divide into {blocks} equal blocks"):
        block_digests([torch.zeros(100, dtype=torch.uint8)], [blocks])


def test_two_allocations_that_begin_at_one_address_are_two():
    whole = np.arange(20 * ROW, dtype=np.uint8)
    for parts in ([whole[: 2 * ROW], whole], [whole, whole[: 2 * ROW]]):
        tensors = [torch.from_numpy(part) for part in parts]
        assert list(tensor_digests(tensors)) == [tensor_digest(tensor.clone()) for tensor in tensors]


def test_many_bytes_are_digested_in_batches_with_the_same_values(monkeypatch):
    area = random_bytes(64 * ROW)
    expected = [tensor_digest(part) for part in area.view(16, -1)]
    monkeypatch.setattr(digest, "_BATCH_BYTES", 9 * ROW)
    assert list(tensor_digests(area.view(16, -1))) == expected
    assert block_digests([area], [16])[0].tolist() == expected  # one tensor is never cut


def test_a_scalar_has_a_digest():
    assert tensor_digest(torch.tensor(1.0)) != tensor_digest(torch.tensor(2.0))


def test_the_value_is_fixed_for_good():
    assert tensor_digest(torch.arange(5000, dtype=torch.int32)) == 3266947417968565046
