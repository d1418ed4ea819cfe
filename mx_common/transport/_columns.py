"""Memory and reads as numpy columns: from a manifest to NIXL's descriptor list without one Python object a segment.

    regions = Regions(addr, length, device, "DRAM").merged()
    reads = Reads(remote_addr, local_addr, length, remote_device, local_device).coalesced()
    nixl_rows = reads.local_rows()                       # (n, 3) uint64: address, length, device

Invariant: columns are 1-D, read-only, uint64, of one length; every range is non-empty, has a non-null address and does not
wrap.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mx_common.errors import ConfigError

__all__ = ["MEMORY_KINDS", "Column", "Reads", "Regions"]

Column = npt.NDArray[np.uint64]

MEMORY_KINDS = ("DRAM", "VRAM")


def _column(owner: str, name: str, values: npt.ArrayLike) -> Column:
    given: npt.NDArray[Any] = np.asarray(values)
    if given.size == 0:
        given = given.astype(np.uint64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ConfigError(f"{owner}.{name} is a 1-D column of whole numbers; got shape {given.shape}, dtype {given.dtype}")
    if given.dtype.kind == "i" and (given < 0).any():
        raise ConfigError(f"{owner}.{name} has the negative value {int(given.min())}; host memory is device 0")
    column = given.astype(np.uint64)
    column.setflags(write=False)
    return column


def _check_equal_lengths(owner: str, columns: dict[str, Column]) -> None:
    if len({len(column) for column in columns.values()}) > 1:
        sizes = ", ".join(f"{name} {len(column)}" for name, column in columns.items())
        raise ConfigError(f"the columns of {owner} have different lengths ({sizes}); give one value a row in each")


def _check_ranges(owner: str, name: str, addr: Column, length: Column) -> None:
    if not len(addr):
        return
    for bad, why in (
        (length == 0, "is empty; drop zero-byte tensors on both sides first"),
        (addr == 0, "starts at address 0; take addresses of allocated memory"),
        (addr + length < addr, "runs past the end of the address space; check address and length"),
    ):
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise ConfigError(f"{owner} row {row}: {name} {int(addr[row]):#x} + {int(length[row])} {why}")


def _check_kind(owner: str, name: str, kind: str) -> None:
    if kind not in MEMORY_KINDS:
        raise ConfigError(f"{owner}.{name} is {kind!r}; known memory kinds: {', '.join(MEMORY_KINDS)}")


def _rows(addr: Column, length: Column, device: Column) -> npt.NDArray[np.uint64]:
    return np.stack((addr, length, device), axis=1)


@dataclass(frozen=True, eq=False)
class Regions:
    """Byte ranges of local memory of one kind: start address, length in bytes, device index (0 for host memory)."""

    addr: Column
    length: Column
    device: Column
    mem: str = "DRAM"

    def __post_init__(self) -> None:
        for name in ("addr", "length", "device"):
            object.__setattr__(self, name, _column("Regions", name, getattr(self, name)))
        _check_equal_lengths("Regions", {"addr": self.addr, "length": self.length, "device": self.device})
        _check_ranges("Regions", "range", self.addr, self.length)
        _check_kind("Regions", "mem", self.mem)

    def __len__(self) -> int:
        return len(self.addr)

    @property
    def total_bytes(self) -> int:
        """Sum of the lengths; bytes in two regions count twice."""
        return int(self.length.sum())

    def merged(self) -> Regions:
        """The same bytes with touching and overlapping ranges of a device joined, ordered by device and address."""
        if len(self) < 2:
            return self
        parts: list[tuple[Column, Column, Column]] = []
        for device in np.unique(self.device):
            mine = self.device == device
            order = np.argsort(self.addr[mine], kind="stable")
            start = self.addr[mine][order]
            reach = np.maximum.accumulate(start + self.length[mine][order])
            first = np.concatenate(([True], start[1:] > reach[:-1]))
            last = np.concatenate((first[1:], [True]))
            begin, end = start[first], reach[last]
            parts.append((begin, end - begin, np.full(len(begin), device, dtype=np.uint64)))
        addr, length, devices = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Regions(addr, length, devices, self.mem)

    def covers(self, addr: Column, length: Column, device: Column) -> npt.NDArray[np.bool_]:
        """For each given range, whether all its bytes lie inside these regions."""
        whole = self.merged()
        inside = np.zeros(len(addr), dtype=np.bool_)
        for one in np.unique(device):
            asked = np.flatnonzero(device == one)
            mine = whole.device == one
            start, stop = whole.addr[mine], (whole.addr + whole.length)[mine]
            if not len(start):
                continue
            at = np.searchsorted(start, addr[asked], side="right").astype(np.int64) - 1
            found = at >= 0
            inside[asked] = found & (addr[asked] + length[asked] <= stop[np.maximum(at, 0)])
        return inside

    def rows(self) -> npt.NDArray[np.uint64]:
        """(n, 3): address, length, device."""
        return _rows(self.addr, self.length, self.device)

    @classmethod
    def joined(cls, parts: Sequence[Regions], mem: str) -> Regions:
        """All regions of `parts` that are of the kind `mem`."""
        same = [part for part in parts if part.mem == mem]
        empty = np.zeros(0, dtype=np.uint64)
        addr, length, device = (
            np.concatenate([empty, *(getattr(part, name) for part in same)]) for name in ("addr", "length", "device")
        )
        return cls(addr, length, device, mem)


@dataclass(frozen=True, eq=False)
class Reads:
    """One-sided copies of contiguous bytes, remote to local; a row is one read. Addresses and lengths in bytes."""

    remote_addr: Column
    local_addr: Column
    length: Column
    remote_device: Column
    local_device: Column
    remote_mem: str = "DRAM"
    local_mem: str = "DRAM"

    def __post_init__(self) -> None:
        names = ("remote_addr", "local_addr", "length", "remote_device", "local_device")
        for name in names:
            object.__setattr__(self, name, _column("Reads", name, getattr(self, name)))
        _check_equal_lengths("Reads", {name: getattr(self, name) for name in names})
        _check_ranges("Reads", "remote range", self.remote_addr, self.length)
        _check_ranges("Reads", "local range", self.local_addr, self.length)
        _check_kind("Reads", "remote_mem", self.remote_mem)
        _check_kind("Reads", "local_mem", self.local_mem)

    def __len__(self) -> int:
        return len(self.length)

    @property
    def total_bytes(self) -> int:
        return int(self.length.sum())

    def _replaced(self, remote_addr: Column, local_addr: Column, length: Column, rows: Any) -> Reads:
        devices = self.remote_device[rows], self.local_device[rows]
        return Reads(remote_addr, local_addr, length, *devices, self.remote_mem, self.local_mem)

    def coalesced(self) -> Reads:
        """The same copies with reads that are adjacent on both sides joined into one, ordered by local device and address."""
        if len(self) < 2:
            return self
        order = np.lexsort((self.remote_addr, self.local_addr, self.remote_device, self.local_device))
        remote, local, length = self.remote_addr[order], self.local_addr[order], self.length[order]
        remote_device, local_device = self.remote_device[order], self.local_device[order]
        follows = (
            (remote[1:] == remote[:-1] + length[:-1])
            & (local[1:] == local[:-1] + length[:-1])
            & (remote_device[1:] == remote_device[:-1])
            & (local_device[1:] == local_device[:-1])
        )
        first = np.flatnonzero(np.concatenate(([True], ~follows)))
        return self._replaced(remote[first], local[first], np.add.reduceat(length, first), order[first])

    def window(self, start: int, stop: int) -> Reads:
        """The copies of bytes [start, stop) of the reads laid end to end in row order; a read that crosses a bound is cut
        there."""
        ends = self._ends
        low = int(np.searchsorted(ends, np.uint64(start), side="right"))
        high = int(np.searchsorted(ends, np.uint64(stop), side="left")) + 1
        rows = slice(low, high)
        begins = ends[rows] - self.length[rows]
        skipped = np.maximum(begins, np.uint64(start)) - begins
        length = np.minimum(ends[rows], np.uint64(stop)) - begins - skipped
        return self._replaced(self.remote_addr[rows] + skipped, self.local_addr[rows] + skipped, length, rows)

    @functools.cached_property
    def _ends(self) -> Column:
        return np.cumsum(self.length, dtype=np.uint64)

    def remote_rows(self) -> npt.NDArray[np.uint64]:
        """(n, 3): remote address, length, remote device."""
        return _rows(self.remote_addr, self.length, self.remote_device)

    def local_rows(self) -> npt.NDArray[np.uint64]:
        """(n, 3): local address, length, local device."""
        return _rows(self.local_addr, self.length, self.local_device)
