"""Was what arrived what was published: digests of row blocks, and numbers that are none.

    wrong = differing(expected, blocks)             # blocks: flat bytes of each row block, where they lie
    nonfinite({"model.norm.weight": tensor})

Invariant: reads memory, writes none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mx_common.load.digest import tensor_digest

if TYPE_CHECKING:
    import torch

__all__ = ["differing", "nonfinite"]

_THREADS = 4


def differing(expected: npt.NDArray[np.uint64], blocks: Sequence[torch.Tensor]) -> list[int]:
    """Indices of blocks whose digest is not the expected one."""
    if len(blocks) < 2 or blocks[0].device.type != "cpu":
        found = [tensor_digest(block) for block in blocks]
    else:
        # torch lets go of the interpreter while it sums
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="mx-digest") as pool:
            found = list(pool.map(tensor_digest, blocks))
    return [int(row) for row in np.flatnonzero(np.array(found, dtype=np.uint64) != expected)]


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
