"""The memory that reads land in: laid out as asked, found by address, side by side."""

from __future__ import annotations

import pytest
import torch

from mx_common.load.digest import ROW
from mx_common.refit import _memory
from mx_common.refit._memory import Memory, end_of

CPU = torch.device("cpu")

WANTED = {
    "dense": torch.empty(3, 5, dtype=torch.bfloat16),
    "transposed": torch.empty(7, 11).t(),
    "gaps": torch.empty(4, 10, dtype=torch.float64)[:, :6],
    "scalar": torch.tensor(1.0),
    "empty": torch.empty(0, 4),
    "large": torch.empty(3 * ROW, dtype=torch.int8),
}


def test_tensors_are_made_with_the_shapes_dtypes_and_strides_asked_for():
    made = Memory(CPU).like(WANTED)
    assert list(made) == list(WANTED)
    for name, tensor in WANTED.items():
        got = made[name]
        assert (got.shape, got.stride(), got.dtype) == (tensor.shape, tensor.stride(), tensor.dtype), name


@pytest.mark.parametrize("bound", [4 << 30, ROW, 2 * ROW])
def test_no_two_of_them_share_a_byte_and_each_is_found_by_address(bound, monkeypatch):
    monkeypatch.setattr(_memory, "_AREA_BYTES", bound)
    memory = Memory(CPU)
    made = {name: tensor for name, tensor in memory.like(WANTED).items() if tensor.numel()}
    for number, tensor in enumerate(made.values()):
        tensor.fill_(number)
    for number, tensor in enumerate(made.values()):
        assert (tensor == number).all()
        memory.bytes_at(tensor.data_ptr(), tensor.element_size())


def test_they_lie_side_by_side_on_the_rows_of_digests():
    memory = Memory(CPU)
    made = memory.like({name: WANTED[name] for name in ("dense", "large", "scalar")})
    first = made["dense"].data_ptr()
    assert [tensor.data_ptr() - first for tensor in made.values()] == [0, ROW, 4 * ROW]
    assert len(memory.regions()) == 1, "one registration for all"


def test_many_small_tensors_take_little_more_than_their_bytes():
    sizes = [64] * 1000
    assert end_of(sizes) <= 1000 * 256
    assert end_of([ROW, *sizes, ROW]) <= 1000 * 256 + 3 * ROW


def test_an_address_outside_says_so():
    memory = Memory(CPU)
    area = memory.area(100)
    with pytest.raises(LookupError, match="50 bytes at 0x"):
        memory.bytes_at(area.data_ptr() + 60, 50)
