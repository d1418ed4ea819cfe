"""Compares a source's table with a target's and plans the reads: pure functions of the two.

    reads = plan_reads(source, target)          # ManifestMismatch says what differs
    check_coverage(reads, target)               # CoverageError says how many bytes are off
    changed = mismatched(source, digests)       # names whose content differs from what the source published

Invariant: a plan that is returned reads every byte of every target tensor exactly once, from the source tensor of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mx_common.errors import CoverageError, ManifestMismatch
from mx_common.load.tensors import TensorTable, some_names
from mx_common.transport import Reads

U64 = npt.NDArray[np.uint64]

__all__ = ["check_coverage", "mismatched", "plan_reads"]


def plan_reads(source: TensorTable, target: TensorTable) -> Reads:
    """One read a tensor; the transport joins those that are adjacent on both sides.

    Raises ManifestMismatch naming tensors that are missing from the source, extra in it, or of another size, dtype or layout
    (layouts are compared where both sides state them).
    """
    places = {name: i for i, name in enumerate(source.names)}
    missing = [name for name in target.names if name not in places]
    own = set(target.names)
    extra = [name for name in source.names if name not in own]
    faults = []
    if missing:
        faults.append(f"the source lacks {some_names(missing)}")
    if extra:
        faults.append(f"the source has {some_names(extra)}, which the target does not")
    index = np.array([places.get(name, 0) for name in target.names], dtype=np.int64)
    if not missing and len(target):
        faults += _differences(source, target, index)
    if faults:
        raise ManifestMismatch("; ".join(faults))
    return Reads(
        remote_addr=source.addr[index],
        local_addr=target.addr,
        length=target.size,
        remote_device=source.device[index],
        local_device=target.device,
        remote_mem=source.mem,
        local_mem=target.mem,
    )


def check_coverage(reads: Reads, target: TensorTable) -> None:
    """Raises CoverageError unless the reads write each byte of the target's tensors once and nothing else."""
    order = np.argsort(reads.local_addr, kind="stable")
    start, stop = _merged(reads.local_addr[order], reads.length[order])
    if (reads.local_addr[order][1:] < (reads.local_addr + reads.length)[order][:-1]).any():
        raise CoverageError("two reads of the plan write the same bytes")
    want_order = np.argsort(target.addr, kind="stable")
    want_start, want_stop = _merged(target.addr[want_order], target.size[want_order])
    if not (np.array_equal(start, want_start) and np.array_equal(stop, want_stop)):
        got, want = int((stop - start).sum()), int((want_stop - want_start).sum())
        raise CoverageError(
            f"the plan writes {got} bytes in {len(start)} ranges, the target needs {want} bytes in {len(want_start)}"
        )


def mismatched(source: TensorTable, names: Sequence[str], digests: Sequence[int]) -> list[str]:
    """Names, of those the source published a digest for, whose digest differs."""
    places = {name: i for i, name in enumerate(source.names)}
    rows = [places[name] for name in names]
    published = source.digest[rows]
    wrong = source.has_digest[rows] & (published != np.array(digests, dtype=np.uint64))
    return [names[i] for i in np.flatnonzero(wrong)]


def _differences(source: TensorTable, target: TensorTable, index: npt.NDArray[np.int64]) -> list[str]:
    faults = []
    resized = np.flatnonzero(source.size[index] != target.size)
    if len(resized):
        shown = [f"{target.names[i]} ({source.size[index[i]]} bytes there, {target.size[i]} here)" for i in resized]
        faults.append(f"of another size: {some_names(shown)}")
    retyped = [
        f"{name} ({source.dtype[j]} there, {kind} here)"
        for name, j, kind in zip(target.names, index, target.dtype, strict=True)
        if source.dtype[j] != kind
    ]
    if retyped:
        faults.append(f"of another dtype: {some_names(retyped)}")
    relaid = [
        f"{name} ({source.layout[j]} there, {layout} here)"
        for name, j, layout in zip(target.names, index, target.layout, strict=True)
        if source.layout[j] and layout and source.layout[j] != layout
    ]
    if relaid and not len(resized):
        faults.append(f"of another layout: {some_names(relaid)}")
    return faults


def _merged(addr: U64, size: U64) -> tuple[U64, U64]:
    """Starts and stops of the union of sorted, touching or overlapping ranges."""
    if not len(addr):
        return addr, addr
    stops = np.maximum.accumulate(addr + size)
    first = np.concatenate(([True], addr[1:] > stops[:-1]))
    starts = addr[first]
    return starts, np.concatenate((stops[:-1][first[1:]], stops[-1:]))
