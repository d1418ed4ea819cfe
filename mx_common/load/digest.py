"""One 64-bit digest per tensor, equal on CPU and GPU memory, computed where the memory lies.

A source publishes the digest of every tensor; a target computes its own after the read and compares. Damage that byte counts
and transports do not see (a torn read, a stale page, two rows swapped, one flipped bit) becomes a `DigestMismatch`.

    tensor_digest(model.lm_head.weight)        # int in [0, 2**64)

The bytes are cut into rows of 2,048; each row, read as signed bytes, is multiplied with a fixed 2,048 x 8 matrix of odd weights in
[-63, 63]; the eight sums of every row, in order, and the byte length are hashed with XXH3.

Invariant: every product and sum is an exact integer below 2**24 in magnitude, so nothing wraps and no two top-bit flips cancel (the
weakness of sums modulo 2**64), and int8 matrix units, float32 units and TF32 all give the same value. A change of any one byte
always changes the eight sums; a change of several goes unseen with a chance of about 2**-55.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

if TYPE_CHECKING:
    import torch

__all__ = ["ROW", "block_digests", "byte_view", "tensor_digest", "tensor_digests"]

ROW = 2048
SUMS = 8
_FLOAT_ROWS = 8192  # rows at a time where sums are made in float32: 64 MiB of scratch


def tensor_digest(tensor: torch.Tensor) -> int:
    """The digest of the bytes `tensor` occupies, in memory order.

    Any dtype, any shape; non-contiguous tensors must fill one gap-free range (a transposed weight does).
    Raises ValueError for a tensor with gaps.
    """
    return block_digests(tensor, 1)[0]


def block_digests(tensor: torch.Tensor, blocks: int) -> list[int]:
    """The digests of `blocks` equal parts of those bytes, each as if it were a tensor of its own.

    Quicker than one by one, where parts are whole rows. Raises ValueError when the bytes do not divide."""
    data = byte_view(tensor)
    if blocks < 1 or data.numel() % blocks:
        raise ValueError(f"{data.numel()} bytes do not divide into {blocks} equal blocks")
    length = data.numel() // blocks
    if length % ROW and blocks > 1:
        return [digest for part in data.view(blocks, length) for digest in block_digests(part, 1)]
    whole = data.numel() - data.numel() % ROW
    sums = [_on_host(_row_sums(data[:whole].view(-1, ROW)))] if whole else []
    if whole < data.numel():
        import torch

        last = torch.zeros(ROW, dtype=torch.int8, device=data.device)
        last[: data.numel() - whole] = data[whole:]
        sums.append(_on_host(_row_sums(last.view(1, ROW))))
    joined = np.concatenate(sums) if sums else np.zeros((0, SUMS), dtype="<i4")
    rows = len(joined) // blocks
    return [_hashed(joined[n * rows : (n + 1) * rows], length) for n in range(blocks)]


def _on_host(sums: torch.Tensor) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(sums.cpu().numpy(), dtype="<i4")


def _hashed(sums: npt.NDArray[np.int32], length: int) -> int:
    state = xxhash.xxh3_64(sums.data.cast("B") if len(sums) else b"")
    state.update(length.to_bytes(8, "little"))
    return int(state.intdigest())


def tensor_digests(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    """Digests in order, one tensor at a time, so that a caller can show progress and stop at the first mismatch."""
    for tensor in tensors:
        yield tensor_digest(tensor)


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a gap-free tensor as a flat int8 tensor without copying. Raises ValueError when it has gaps."""
    import torch

    flat = tensor.detach()
    if not flat.is_contiguous():
        order = sorted(range(flat.dim()), key=lambda d: (flat.stride(d), flat.shape[d]), reverse=True)
        flat = flat.permute(order)
        if not flat.is_contiguous():
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps between its elements; "
                "only tensors that fill one range of memory can be shared"
            )
    return flat.reshape(-1).view(torch.int8)


def _row_sums(rows: torch.Tensor) -> torch.Tensor:
    """int32 [n, SUMS] of int8 [n, ROW]."""
    import torch

    if rows.device.type == "cpu" and hasattr(torch, "_int_mm"):
        return torch._int_mm(rows, _weights("cpu", "int8"))
    weights = _weights(str(rows.device), "float32")
    out = torch.empty((rows.shape[0], SUMS), dtype=torch.int32, device=rows.device)
    for start in range(0, rows.shape[0], _FLOAT_ROWS):
        stop = start + _FLOAT_ROWS
        out[start:stop] = torch.mm(rows[start:stop].to(torch.float32), weights).to(torch.int32)
    return out


@functools.lru_cache(maxsize=64)
def _weights(device: str, dtype: str) -> torch.Tensor:
    """The fixed matrix: odd, so never zero; at most 63, so that pairs fit the 16 bits some CPUs accumulate in."""
    import torch

    stream = b"".join(xxhash.xxh3_64_digest(b"mx-digest", seed=i) for i in range(ROW * SUMS // 8))
    values = (np.frombuffer(stream, dtype=np.uint8).astype(np.int16) % 64) * 2 - 63
    matrix = torch.from_numpy(values.reshape(ROW, SUMS).astype(np.int8))
    return matrix.to(device=device, dtype=getattr(torch, dtype))
