"""Row blocks: the unit in which a shard's content is digested, so that a receiver of part of a shard can still verify what it read.

    blocks = row_blocks(rows=4096, nbytes=16 << 20)          # 8
    row_block_digests([tensor], [blocks])                    # [[8] uint64], on either side

Invariant: blocks are equal, consecutive along dim 0, and dense in memory; source and receiver cut alike without talking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mx_common.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["row_block_digests", "row_blocks"]

BLOCK_COUNTS = (8, 4, 2)
MIN_BLOCK_BYTES = 64 << 10  # below this a digest costs more in calls than in bytes
ALIGNMENT = 2048  # blocks of whole digest rows are summed in one pass over the shard


def row_blocks(rows: int, nbytes: int) -> int:
    """Into how many row blocks a shard of `rows` (its dim 0; 1 for a scalar) and `nbytes` bytes is cut: the largest of 8, 4, 2 that divides
    the rows and leaves 64 KiB or more a block, a multiple of 2,048 bytes; else 1."""
    for count in BLOCK_COUNTS:
        if rows % count == 0 and nbytes >= count * MIN_BLOCK_BYTES and nbytes % (count * ALIGNMENT) == 0:
            return count
    return 1


def row_block_digests(tensors: Sequence[torch.Tensor], blocks: Sequence[int]) -> list[npt.NDArray[np.uint64]]:
    """For each contiguous tensor, [blocks] uint64: the digest of each of its equal row blocks, where it lies.

    Raises ConfigError when the blocks do not divide its rows.
    """
    from mx_common.load.digest import block_digests

    for tensor, count in zip(tensors, blocks, strict=True):
        rows = tensor.shape[0] if tensor.dim() else 1
        if count < 1 or rows % count:
            raise ConfigError(
                f"{rows} rows do not divide into {count} equal blocks; take the count from row_blocks or from the shard table"
            )
    return block_digests(tensors, blocks)
