"""What one worker holds: names, addresses, sizes, dtypes, layouts and digests, as columns.

The same table describes a source (read from its manifest) and a target (read off its model), so that comparing the two and planning
the reads are functions of two values.

    mine = TensorTable.from_torch(engine.build())
    theirs = TensorTable.from_descriptors(manifest.tensors)

Invariant: names are unique, every tensor has at least one byte (empty ones are dropped on both sides), and every tensor fills one
gap-free range of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mx_common.errors import ManifestMismatch
from mx_common.load.digest import byte_view
from mx_common.transport import Regions

if TYPE_CHECKING:
    import torch

__all__ = ["TensorTable", "some_names"]

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class TensorTable:
    """Columns of n tensors. `layout` is shape and strides as text, "" when the peer does not say; `digest[i]` counts only where
    `has_digest[i]`; `mem` is "DRAM" or "VRAM"."""

    names: tuple[str, ...]
    addr: U64
    size: U64
    device: U64
    dtype: tuple[str, ...]
    layout: tuple[str, ...]
    digest: U64
    has_digest: npt.NDArray[np.bool_]
    mem: str = "DRAM"
    held: tuple[Any, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        seen: set[str] = set()
        twice = sorted({name for name in self.names if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
        if twice:
            raise ManifestMismatch(f"{some_names(twice)} listed more than once; the manifest cannot be trusted")
        if any(not name for name in self.names):
            raise ManifestMismatch("a tensor without a name; the manifest cannot be trusted")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def total_bytes(self) -> int:
        return int(self.size.sum())

    @property
    def digested(self) -> bool:
        """Whether every tensor has a digest."""
        return bool(self.has_digest.all())

    @classmethod
    def from_torch(cls, tensors: Mapping[str, torch.Tensor], digests: Sequence[int] | None = None) -> TensorTable:
        """The table of live tensors, which it keeps referenced; a view that lies inside another tensor is left out.

        Raises ValueError for a tensor with gaps, for two that overlap in part, and for mixed kinds of memory.
        """
        spans = {}
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                try:
                    byte_view(tensor)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
            if tensor.nbytes:
                spans[name] = (tensor.device, tensor.data_ptr(), tensor.nbytes)
        names = _without_aliases(spans)
        kept = {name: tensors[name] for name in names}
        kinds = sorted({spans[name][0].type for name in names})
        if len(kinds) > 1:
            raise ValueError(
                f"tensors lie on {' and '.join(kinds)}; one worker shares one kind of memory (turn weight offloading off)"
            )
        values = np.zeros(len(kept), dtype=np.uint64) if digests is None else np.array(digests, dtype=np.uint64)
        return cls(
            names=tuple(kept),
            addr=np.array([spans[name][1] for name in names], dtype=np.uint64),
            size=np.array([spans[name][2] for name in names], dtype=np.uint64),
            device=np.array([spans[name][0].index or 0 for name in names], dtype=np.uint64),
            dtype=tuple(str(t.dtype) for t in kept.values()),
            layout=tuple(_layout(t) for t in kept.values()),
            digest=values,
            has_digest=np.full(len(kept), digests is not None, dtype=np.bool_),
            mem="DRAM" if kinds in ([], ["cpu"]) else "VRAM",
            held=tuple(kept.values()),
        )

    @classmethod
    def from_descriptors(cls, descriptors: Iterable[Any], mem: str = "DRAM") -> TensorTable:
        """The table a manifest describes. Raises ManifestMismatch when it contradicts itself."""
        kept = [d for d in descriptors if d.size > 0]
        return cls(
            names=tuple(d.name for d in kept),
            addr=np.array([d.addr for d in kept], dtype=np.uint64),
            size=np.array([d.size for d in kept], dtype=np.uint64),
            device=np.array([d.device_id for d in kept], dtype=np.uint64),
            dtype=tuple(d.dtype for d in kept),
            layout=tuple(d.layout for d in kept),
            digest=np.array([d.digest for d in kept], dtype=np.uint64),
            has_digest=np.array([d.HasField("digest") for d in kept], dtype=np.bool_),
            mem=mem,
        )

    def with_digests_of(self, other: TensorTable) -> TensorTable:
        """This table with the digests of the tensors of the same names in `other`, which must have them all."""
        digests = dict(zip(other.names, other.digest, strict=True))
        return self.with_digests([int(digests[name]) for name in self.names])

    def with_digests(self, digests: Sequence[int]) -> TensorTable:
        """This table with one digest a tensor, in its order."""
        return replace(self, digest=np.array(digests, dtype=np.uint64), has_digest=np.full(len(self), True, dtype=np.bool_))

    def fill(self, descriptors: Any) -> None:
        """Append this table to a repeated TensorDescriptor field."""
        for i, name in enumerate(self.names):
            row = descriptors.add(
                name=name,
                addr=int(self.addr[i]),
                size=int(self.size[i]),
                device_id=int(self.device[i]),
                dtype=self.dtype[i],
                layout=self.layout[i],
            )
            if self.has_digest[i]:
                row.digest = int(self.digest[i])

    def regions(self) -> Regions:
        """The memory to register with a transport."""
        return Regions(self.addr, self.size, self.device, self.mem)


def _without_aliases(spans: Mapping[str, tuple[torch.device, int, int]]) -> list[str]:
    """Names in their own order, less those whose bytes all belong to an earlier or larger tensor. Spans: device, address, bytes."""
    inside: set[str] = set()
    last_name, last_device, last_stop = "", ("", 0), 0
    rows = [
        ((device.type, device.index or 0), start, -length, place, name)  # its text costs more than all the rest
        for place, (name, (device, start, length)) in enumerate(spans.items())
    ]
    for device, start, negative, _, name in sorted(rows):
        if device != last_device or start >= last_stop:
            last_name, last_device, last_stop = name, device, start - negative
        elif start - negative <= last_stop:
            inside.add(name)
        else:
            raise ValueError(f"{name} and {last_name} overlap in part; such memory cannot be shared")
    return [name for name in spans if name not in inside]


def _layout(tensor: torch.Tensor) -> str:
    shape = "x".join(map(str, tensor.shape))
    return shape if tensor.is_contiguous() else f"{shape}/{','.join(map(str, tensor.stride()))}"


def some_names(names: Sequence[str], limit: int = 5) -> str:
    """The first names of a list for a message, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
