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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
_BATCH_BYTES = 256 << 20  # of tensors at a time: some 4 MiB of sums, one copy to the host
_GAP_BYTES = 32 * ROW  # between tensors whose rows are summed in one call: to sum it as well costs less than another call


def tensor_digest(tensor: torch.Tensor) -> int:
    """The digest of the bytes `tensor` occupies, in memory order.

    Any dtype, any shape; non-contiguous tensors must fill one gap-free range (a transposed weight does).
    Raises ValueError for a tensor with gaps.
    """
    return int(block_digests([tensor], [1])[0][0])


def tensor_digests(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    """Digests in order, in batches, so that a caller can show progress and stop at the first mismatch. The tensors of a batch are held
    together: an iterator that gives one buffer again and again is not for this."""
    for batch in _batches((byte_view(tensor), 1) for tensor in tensors):
        yield from (int(digests[0]) for digests in _batch_digests(batch))


def block_digests(tensors: Iterable[torch.Tensor], blocks: Iterable[int]) -> list[npt.NDArray[np.uint64]]:
    """For each tensor, [blocks] uint64: the digests of that many equal parts of its bytes, each as if it were a tensor of its own.

    Tensors that lie beside each other in one allocation, a multiple of `ROW` bytes apart, take one call for all. Raises ValueError when
    the bytes of one do not divide."""
    return [
        digests for batch in _batches(zip(map(byte_view, tensors), blocks, strict=True)) for digests in _batch_digests(batch)
    ]


def _batches(runs: Iterable[tuple[torch.Tensor, int]]) -> Iterator[list[tuple[torch.Tensor, int]]]:
    """(bytes, blocks) in order, of one device, until they are many bytes."""
    batch: list[tuple[torch.Tensor, int]] = []
    used = 0
    for data, blocks in runs:
        if blocks < 1 or data.numel() % blocks:
            raise ValueError(f"{data.numel()} bytes do not divide into {blocks} equal blocks")
        if batch and (used + data.numel() + blocks * ROW > _BATCH_BYTES or data.device != batch[0][0].device):
            yield batch
            batch, used = [], 0
        batch.append((data, blocks))
        used += data.numel() + blocks * ROW  # a row of its own for each end
    if batch:
        yield batch


class _Part:
    """Bytes whose whole rows follow each other among the sums, from `row` on; the bytes after them are row `tail`, if there are any."""

    __slots__ = ("blocks", "data", "row", "rows", "tail")

    def __init__(self, data: torch.Tensor, blocks: int) -> None:
        self.data, self.blocks = data, blocks
        self.rows = data.numel() // ROW
        self.row = self.tail = 0


def _batch_digests(batch: Sequence[tuple[torch.Tensor, int]]) -> list[npt.NDArray[np.uint64]]:
    # blocks that end within a row are parts of their own, others are cut from the sums of one
    cut = [data.numel() % (blocks * ROW) != 0 for data, blocks in batch]
    parts = [
        [_Part(one, 1) for one in data.view(blocks, -1)] if apart else [_Part(data, blocks)]
        for (data, blocks), apart in zip(batch, cut, strict=True)
    ]
    sums = _sums([part for run in parts for part in run]).data
    return [np.array([digest for part in run for digest in _hashed(part, sums)], dtype=np.uint64) for run in parts]


def _sums(parts: Sequence[_Part]) -> npt.NDArray[np.uint8]:
    """The bytes of [n, SUMS] int32; says in each part where its own are."""
    import torch

    passes: list[_Pass] = []
    end = 0
    for part in sorted((part for part in parts if part.rows), key=lambda part: part.data.data_ptr()):
        if not passes or not passes[-1].takes(part):
            end += passes[-1].rows if passes else 0
            passes.append(_Pass.of(part, end))
        else:
            passes[-1].add(part)
    end += passes[-1].rows if passes else 0
    device = parts[0].data.device
    ends = [part for part in parts if part.data.numel() % ROW]
    sums = torch.empty((end + len(ends), SUMS), dtype=torch.int32, device=device)
    for one in passes:
        _row_sums(one.first.as_strided((one.rows, ROW), (ROW, 1)), sums[one.row : one.row + one.rows])
    if ends:
        filled = torch.zeros((len(ends), ROW), dtype=torch.int8, device=device)
        for part, last in zip(ends, filled, strict=True):
            left = part.data[part.rows * ROW :]
            last[: left.numel()] = left
        for part, row in zip(ends, range(end, end + len(ends)), strict=True):
            part.tail = row
        _row_sums(filled, sums[end:])
    return np.ascontiguousarray(sums.cpu().numpy(), dtype="<i4").reshape(-1).view(np.uint8)


@dataclass
class _Pass:
    """Rows of one allocation, a few of them nobody's, that are summed in one call, into `sums` from `row` on."""

    first: torch.Tensor
    storage: tuple[int, int]
    addr: int
    row: int
    rows: int

    @classmethod
    def of(cls, part: _Part, row: int) -> _Pass:
        part.row = row
        return cls(part.data, _storage(part.data), part.data.data_ptr(), row, part.rows)

    def takes(self, part: _Part) -> bool:
        apart = part.data.data_ptr() - self.addr
        near = apart % ROW == 0 and apart - self.rows * ROW <= min(_GAP_BYTES, self.rows * ROW)
        return near and _storage(part.data) == self.storage

    def add(self, part: _Part) -> None:
        first = (part.data.data_ptr() - self.addr) // ROW
        part.row = self.row + first
        self.rows = max(self.rows, first + part.rows)


def _storage(data: torch.Tensor) -> tuple[int, int]:
    """Address and bytes: two that begin at one address may end apart."""
    storage = data.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _hashed(part: _Part, sums: memoryview) -> Iterator[int]:
    size = SUMS * 4
    length = (part.data.numel() // part.blocks).to_bytes(8, "little")
    rows = part.rows // part.blocks
    for block in range(part.blocks):
        row = part.row + block * rows
        state = xxhash.xxh3_64(sums[row * size : (row + rows) * size])
        if part.data.numel() % ROW:
            state.update(sums[part.tail * size : (part.tail + 1) * size])
        state.update(length)
        yield int(state.intdigest())


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


def _row_sums(rows: torch.Tensor, into: torch.Tensor) -> None:
    """int32 [n, SUMS] of int8 [n, ROW]."""
    import torch

    if rows.device.type == "cpu" and hasattr(torch, "_int_mm"):
        torch._int_mm(rows, _weights("cpu", "int8"), out=into)
        return
    weights = _weights(str(rows.device), "float32")
    for start in range(0, rows.shape[0], _FLOAT_ROWS):
        stop = start + _FLOAT_ROWS
        into[start:stop] = torch.mm(rows[start:stop].to(torch.float32), weights).to(torch.int32)


@functools.lru_cache(maxsize=64)
def _weights(device: str, dtype: str) -> torch.Tensor:
    """The fixed matrix: odd, so never zero; at most 63, so that pairs fit the 16 bits some CPUs accumulate in."""
    import torch

    stream = b"".join(xxhash.xxh3_64_digest(b"mx-digest", seed=i) for i in range(ROW * SUMS // 8))
    values = (np.frombuffer(stream, dtype=np.uint8).astype(np.int16) % 64) * 2 - 63
    matrix = torch.from_numpy(values.reshape(ROW, SUMS).astype(np.int8))
    return matrix.to(device=device, dtype=getattr(torch, dtype))
