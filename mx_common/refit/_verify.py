"""Was what arrived what was published: digests of row blocks, and numbers that are none.

    wrong = differing(expected, runs)               # runs: flat bytes of consecutive row blocks, where they lie
    nonfinite({"model.norm.weight": tensor})

Invariant: reads memory, writes none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mx_common.load.digest import block_digests

if TYPE_CHECKING:
    import torch

__all__ = ["differing", "nonfinite"]


def differing(expected: Sequence[npt.NDArray[np.uint64]], runs: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """(run, block) of each block whose digest is not the expected one. `runs`: flat bytes of consecutive blocks, where they lie;
    `expected`: the digests of each run's blocks."""

    def found(run: int) -> npt.NDArray[np.bool_]:
        differs: npt.NDArray[np.bool_] = (
            np.array(block_digests(runs[run], len(expected[run])), dtype=np.uint64) != expected[run]
        )
        return differs

    threads = _threads(runs)
    if threads == 1:
        wrong = [found(run) for run in range(len(runs))]
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="mx-digest") as pool:
            wrong = list(pool.map(found, range(len(runs))))
    return [(run, int(block)) for run, flags in enumerate(wrong) for block in np.flatnonzero(flags)]


def _threads(runs: Sequence[torch.Tensor]) -> int:
    """As many as leave each the cores that torch takes within one sum."""
    import torch

    if len(runs) < 2 or runs[0].device.type != "cpu":
        return 1
    return max(1, min(len(runs), len(os.sched_getaffinity(0)) // int(torch.get_num_threads())))


def nonfinite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of floating-point tensors with NaN or infinity in them."""
    import torch

    strange = []
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if tensor.dtype.itemsize == 1:
            tensor = tensor.float()  # 8-bit floats can do little
        # one pass at memory speed; a finite tensor may overflow it, so the rare hit is looked at closely
        if not torch.isfinite(_finite_if_all_are(tensor)) and not torch.isfinite(tensor).all():
            strange.append(name)
    return strange


def _finite_if_all_are(tensor: torch.Tensor) -> torch.Tensor:
    """A number that is not finite when one in `tensor` is not, and seldom else."""
    import torch

    if tensor.dtype in (torch.bfloat16, torch.float32, torch.float64):
        return tensor.sum()
    low, high = torch.aminmax(tensor)  # sums of float16 overflow too easily
    return low.float().abs() + high.float().abs()
