"""The memory a receiver reads into: registered once, found again by address.

    memory = Memory(device)
    shadows = memory.like(parameters)               # same shapes, dtypes and strides, side by side
    area = memory.area(512 << 20)                   # bytes to carve tensors from
    memory.bytes_at(addr, nbytes)                   # what lies there, as a flat int8 tensor

Invariant: a buffer is never moved or freed while its `Memory` lives, so addresses may be kept in plans and registrations.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mx_common.load.digest import ROW, byte_view
from mx_common.transport import Regions

if TYPE_CHECKING:
    import torch

__all__ = ["ALIGNMENT", "Memory", "carved", "end_after", "end_of"]

ALIGNMENT = 256
_AREA_BYTES = 4 << 30  # of an area for several tensors: one of many times that may find no room in one piece


class Memory:
    """Buffers on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[tuple[int, int, torch.Tensor]] = []  # start, end, flat bytes; sorted

    @property
    def mem(self) -> str:
        """Kind of memory, as transports name it."""
        return "DRAM" if self.device.type == "cpu" else "VRAM"

    def like(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """New tensors laid out as `tensors`, their values undefined."""
        made: dict[str, torch.Tensor] = {}
        for batch in _batches(tensors):
            area = self.area(end_of(_extent(tensor) for tensor in batch.values()))
            end = 0
            for name, tensor in batch.items():
                end = end_after(end, _extent(tensor))
                # in its own strides: places are told in those, and a tensor with gaps has others when it is made dense
                flat = area[end - _extent(tensor) : end].view(tensor.dtype)
                made[name] = flat.as_strided(tensor.shape, tensor.stride())
        return made

    def area(self, nbytes: int) -> torch.Tensor:
        """`nbytes` new bytes."""
        import torch

        return self.adopt(torch.empty(nbytes, dtype=torch.uint8, device=self.device))

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let reads land in memory that exists. Raises ValueError when it has gaps."""
        if tensor.nbytes and self._find(tensor.data_ptr()) is None:
            self._keep(byte_view(tensor))
        return tensor

    def bytes_at(self, addr: int, nbytes: int) -> torch.Tensor:
        """[nbytes] int8. Raises LookupError for a range outside the buffers: a plan of other memory."""
        found = self._find(addr)
        if found is None or addr + nbytes > found[1]:
            raise LookupError(f"{nbytes} bytes at {addr:#x} are not in this memory")
        return found[2][addr - found[0] : addr - found[0] + nbytes]

    def regions(self) -> Regions:
        """All buffers, for a transport to register."""
        rows = [(start, end - start) for start, end, _ in self._buffers]
        addr, length = np.array(rows, dtype=np.uint64).reshape(-1, 2).T
        return Regions(addr, length, np.full(len(rows), self.device.index or 0, dtype=np.uint64), self.mem)

    @property
    def nbytes(self) -> int:
        """Bytes in all buffers."""
        return sum(end - start for start, end, _ in self._buffers)

    def _keep(self, flat: torch.Tensor) -> None:
        bisect.insort(self._buffers, (flat.data_ptr(), flat.data_ptr() + flat.nbytes, flat), key=lambda b: b[0])

    def _find(self, addr: int) -> tuple[int, int, torch.Tensor] | None:
        at = bisect.bisect_right(self._buffers, addr, key=lambda b: b[0]) - 1
        return self._buffers[at] if at >= 0 and addr < self._buffers[at][1] else None


def carved(area: torch.Tensor, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[torch.Tensor]:
    """Dense tensors of these shapes and dtypes, one after the other in `area`, each aligned. Raises ValueError when they do not fit."""
    end, made = 0, []
    for shape, dtype in wanted:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        end = end_after(end, nbytes)
        if end > area.numel():
            raise ValueError(f"{len(wanted)} tensors do not fit {area.numel()} bytes")
        made.append(area[end - nbytes : end].view(dtype).view(shape))
    return made


def end_after(used: int, nbytes: int) -> int:
    """Where a tensor of `nbytes` ends that is placed into an area of which `used` bytes are taken. Whole rows of digests lie on rows, so
    that those of what is side by side are summed in one call; small tensors do not pay for that."""
    step = ROW if nbytes >= ROW else ALIGNMENT
    return -(-used // step) * step + nbytes


def end_of(sizes: Iterable[int]) -> int:
    """The bytes that an area for tensors of these sizes takes, in this order; never none."""
    end = 0
    for nbytes in sizes:
        end = end_after(end, nbytes)
    return max(end, ALIGNMENT)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from its first element to its last, gaps included."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())


def _batches(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """In order, each until it is many bytes."""
    batch: dict[str, torch.Tensor] = {}
    used = 0
    for name, tensor in tensors.items():
        if batch and end_after(used, _extent(tensor)) > _AREA_BYTES:
            yield batch
            batch, used = {}, 0
        batch[name] = tensor
        used = end_after(used, _extent(tensor))
    if batch:
        yield batch
