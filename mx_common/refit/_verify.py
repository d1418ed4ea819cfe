"""Was what arrived what was published: digests of row blocks, and numbers that are none.

    wrong = differing(expected, runs)               # runs: flat bytes of consecutive row blocks, where they lie
    nonfinite({"model.norm.weight": tensor})

Invariant: reads memory, writes none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    found = block_digests(runs, map(len, expected))
    return [
        (run, int(block))
        for run, (digests, wanted) in enumerate(zip(found, expected, strict=True))
        for block in np.flatnonzero(digests != wanted)
    ]


def nonfinite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of floating-point tensors with NaN or infinity in them."""
    import torch

    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    if not floats:
        return []
    # one pass at memory speed and one answer from the device for all; a finite tensor may overflow it, so the rare hit is looked at closely
    finite = torch.stack([_finite_if_all_are(_able(tensor)).double() for tensor in floats.values()]).isfinite().tolist()
    return [
        name
        for name, is_finite in zip(floats, finite, strict=True)
        if not is_finite and not _able(floats[name]).isfinite().all()
    ]


def _able(tensor: torch.Tensor) -> torch.Tensor:
    """8-bit floats can do little. One tensor at a time: this is four times its memory."""
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def _finite_if_all_are(tensor: torch.Tensor) -> torch.Tensor:
    """A number that is not finite when one in `tensor` is not, and seldom else."""
    import torch

    if tensor.dtype in (torch.bfloat16, torch.float32, torch.float64):
        return tensor.sum()
    low, high = torch.aminmax(tensor)  # sums of float16 overflow too easily
    return low.float().abs() + high.float().abs()
