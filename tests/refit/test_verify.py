"""What arrived is looked at before it is installed."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from mx_common.load.digest import tensor_digest
from mx_common.refit._verify import differing, nonfinite

DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.float16, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_none_is_found_in_any_dtype(dtype, bad):
    tensor = torch.ones(1000)
    assert nonfinite({"fine": tensor.to(dtype)}) == []
    tensor[737] = bad
    assert nonfinite({"fine": torch.ones(3, dtype=dtype), "spoilt": tensor.to(dtype)}) == ["spoilt"]


def test_large_finite_numbers_whole_numbers_and_empty_tensors_are_no_finding():
    large = {dtype: torch.full((100_000,), torch.finfo(dtype).max, dtype=dtype) for dtype in DTYPES}
    assert nonfinite({str(dtype): tensor for dtype, tensor in large.items()}) == []
    assert nonfinite({"whole": torch.ones(4, dtype=torch.int8), "empty": torch.empty(0)}) == []


def test_8_bit_floats_are_looked_at_one_tensor_at_a_time(monkeypatch):
    alive, most = 0, 0

    def gone():
        nonlocal alive
        alive -= 1

    def counted(tensor, made=torch.Tensor.float):
        nonlocal alive, most
        wide = made(tensor)
        weakref.finalize(wide, gone)
        alive += 1
        most = max(most, alive)
        return wide

    monkeypatch.setattr(torch.Tensor, "float", counted)
    tensors = {str(n): torch.ones(100).to(torch.float8_e4m3fn) for n in range(10)}
    tensors["7"].view(torch.uint8)[3] = 0x7F  # NaN
    assert nonfinite(tensors) == ["7"]
    assert most == 1


@pytest.mark.parametrize("block", [100, 2048, 5000, 4 * 2048])
def test_each_block_that_differs_is_found(block):
    runs = [torch.randint(-128, 127, (count * block,), dtype=torch.int8) for count in (1, 4, 8)]
    expected = [np.array([tensor_digest(part) for part in run.view(-1, block)], dtype=np.uint64) for run in runs]
    assert differing(expected, runs) == []
    runs[1][2 * block + 5] += 1
    runs[2][7 * block] += 1
    assert differing(expected, runs) == [(1, 2), (2, 7)]
    assert differing([], []) == []
