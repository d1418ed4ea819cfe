"""Who holds which box of which tensor, where: the columns that a trainer rank publishes and a receiver plans with.

    table = ShardTable.from_held(held, Agent("tp0", "trainer-7", metadata), digests=True)
    manifest = table.encode()                                           # bytes; manifest_digest(manifest) is its digest
    whole = ShardTable.merged([ShardTable.decode(m) for m in manifests])
    whole.check()                                                       # every tensor covered, nothing held twice but replicas

A row is a shard: a dense row-major box of a global tensor at an address of one agent. Tensors of lower rank than the table's widest are
padded on the right, shapes and sizes with 1 and starts with 0.

Invariant: every box is non-empty and lies inside its tensor, every address range is sound, columns are read-only; equal tables encode to
equal bytes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from mx_common.directory.refit_worker import manifest_digest
from mx_common.errors import ConfigError, CoverageError, ManifestMismatch
from mx_common.refit import _boxes, _codec
from mx_common.refit._blocks import row_block_digests, row_blocks
from mx_common.refit._merge import merged_fields
from mx_common.refit._table_rules import as_column, check_rules
from mx_common.transport._columns import MEMORY_KINDS

if TYPE_CHECKING:
    from mx_common.refit.held import Held

__all__ = ["Agent", "ShardTable", "manifest_digest", "row_block_digests", "row_blocks"]

Ints = npt.NDArray[np.int64]
Index = npt.NDArray[np.int32]
Column = npt.NDArray[np.uint64]

_DTYPES = {
    "itemsize": np.int64,
    "shape": np.int64,
    "ndim": np.int64,
    "tensor": np.int32,
    "start": np.int64,
    "size": np.int64,
    "addr": np.uint64,
    "device": np.uint64,
    "agent": np.int32,
    "digests": np.uint64,
    "digest_offset": np.int64,
}


@dataclass(frozen=True)
class Agent:
    """A process that holds shards. `slot`: its place in the trainer, the same after a restart ("tp0-pp1"); `name`: of its transport,
    another one after a restart; `metadata`: what a transport connects with; `mem`: kind of its memory, "DRAM" or "VRAM"; `framework`: what
    trains there, for records."""

    slot: str
    name: str
    metadata: bytes = b""
    mem: str = "DRAM"
    framework: str = ""

    def __post_init__(self) -> None:
        if not self.slot or not self.name:
            raise ConfigError(f"an agent needs a slot and a name; got slot {self.slot!r}, name {self.name!r}")
        if self.mem not in MEMORY_KINDS:
            raise ConfigError(f"agent {self.name} has memory of kind {self.mem!r}; known: {', '.join(MEMORY_KINDS)}")


@dataclass(frozen=True, eq=False)
class ShardTable:
    """Columns of T tensors and of S shards of them, D dims wide (D: the largest rank, at least 1).

    Per tensor: `names` (unique), `dtype` ("bfloat16"), `itemsize` bytes [T], `shape` [T, D] global, `ndim` [T] its rank.
    Per shard: `tensor` [S] row in the tensor columns, `start` and `size` [S, D] the box in elements, `addr` [S] bytes, `device` [S] (0 for
    host memory), `agent` [S] row in `agents`. Digests of row blocks: those of shard i are `digests[digest_offset[i]:digest_offset[i + 1]]`,
    one for each equal block of its rows; none where they were not made.
    Raises ConfigError, naming tensor or row, for columns that do not fit together.
    """

    names: tuple[str, ...]
    dtype: tuple[str, ...]
    itemsize: Ints
    shape: Ints
    ndim: Ints
    tensor: Index
    start: Ints
    size: Ints
    addr: Column
    device: Column
    agent: Index
    agents: tuple[Agent, ...]
    digests: Column
    digest_offset: Ints

    def __post_init__(self) -> None:
        for name in ("names", "dtype", "agents"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, dtype in _DTYPES.items():
            object.__setattr__(self, name, as_column(name, getattr(self, name), dtype))
        check_rules(self)

    def __len__(self) -> int:
        return len(self.tensor)

    @functools.cached_property
    def nbytes(self) -> Column:
        """[S] uint64: bytes of each shard."""
        return (_boxes.volumes(self.size) * self.itemsize[self.tensor]).astype(np.uint64)

    @property
    def total_bytes(self) -> int:
        """Sum over the shards; a replica counts again."""
        return int(self.nbytes.sum())

    @classmethod
    def from_held(cls, held: Sequence[Held], agent: Agent, digests: bool) -> ShardTable:
        """The shards of one agent, in the order given; tensors without elements are left out. `digests`: also read every byte once.

        Raises ManifestMismatch when two entries disagree on a tensor's shape or dtype, ConfigError for memory of another kind than the
        agent's.
        """
        rows = [one for one in held if one.tensor.numel()]
        for one in rows:
            if one.tensor.is_cpu != (agent.mem == "DRAM"):
                raise ConfigError(
                    f"{one.name} lies on {one.tensor.device}, agent {agent.name} serves {agent.mem}; give each kind an agent"
                )
        index: dict[str, int] = {}
        first: list[Held] = []
        for one in rows:
            known = index.setdefault(one.name, len(first))
            if known == len(first):
                first.append(one)
            elif (one.shape, one.tensor.dtype) != (first[known].shape, first[known].tensor.dtype):
                raise ManifestMismatch(
                    f"{agent.slot} holds {one.name} as {_described(first[known])} and as {_described(one)}; one name is one tensor"
                )
        width = max((len(one.shape) for one in first), default=1) or 1
        table = cls(
            names=tuple(index),
            dtype=tuple(str(one.tensor.dtype).removeprefix("torch.") for one in first),
            itemsize=np.array([one.tensor.element_size() for one in first], dtype=np.int64),
            shape=_padded([one.shape for one in first], width, 1),
            ndim=np.array([len(one.shape) for one in first], dtype=np.int64),
            tensor=np.array([index[one.name] for one in rows], dtype=np.int32),
            start=_padded([one.start for one in rows], width, 0),
            size=_padded([tuple(one.tensor.shape) for one in rows], width, 1),
            addr=np.array([one.tensor.data_ptr() for one in rows], dtype=np.uint64),
            device=np.array([one.tensor.device.index or 0 for one in rows], dtype=np.uint64),
            agent=np.zeros(len(rows), dtype=np.int32),
            agents=(agent,),
            digests=np.zeros(0, dtype=np.uint64),
            digest_offset=np.zeros(len(rows) + 1, dtype=np.int64),
        )
        return table.with_digests(rows) if digests else table

    def with_digests(self, held: Sequence[Held]) -> ShardTable:
        """The same shards with digests of what their memory holds now. `held`: what `from_held` was given. Raises ConfigError when
        it is of other shards."""
        rows = [one for one in held if one.tensor.numel()]
        if [one.tensor.data_ptr() for one in rows] != self.addr.tolist():
            raise ConfigError(
                f"digests are made of the {len(self)} shards of this table, in its order; the held tensors are others"
            )
        counts = [row_blocks(int(n), int(nbytes)) for n, nbytes in zip(self.size[:, 0], self.nbytes, strict=True)]
        parts = row_block_digests([one.tensor for one in rows], counts)
        flat = np.concatenate([np.zeros(0, dtype=np.uint64), *parts])
        return replace(self, digests=flat, digest_offset=_offsets(counts))

    def encode(self) -> bytes:
        """The manifest: equal tables give equal bytes."""
        return _codec.encode(self)

    @classmethod
    def decode(cls, manifest: bytes) -> ShardTable:
        """The table that `encode` wrote. Raises ManifestMismatch for anything else."""
        fields = _codec.decode(manifest)
        try:
            fields["agents"] = tuple(Agent(*agent) for agent in fields["agents"])
            return cls(**fields)
        except (ConfigError, TypeError) as error:
            raise ManifestMismatch(f"a shard table that contradicts itself: {error}") from error

    @classmethod
    def merged(cls, tables: Iterable[ShardTable]) -> ShardTable:
        """The shards of all `tables`, in that order; give them by slot, so that equal fleets give equal signatures.

        Raises ManifestMismatch when two disagree on a tensor's shape or dtype, naming it and both slots, when an agent or a slot appears
        twice, and when there are none.
        """
        given = list(tables)
        if not given:
            raise ManifestMismatch("no shard tables to merge; wait until every expected slot has published its own")
        return given[0] if len(given) == 1 else cls(**merged_fields(given))

    def layout_signature(self) -> str:
        """What a plan's shape depends on: tensors, boxes, and the slots that hold them. Equal after a restart of the same layout."""
        slots = [[one.slot, one.mem] for one in self.agents]
        return self._signature(slots, ("itemsize", "ndim", "shape", "tensor", "start", "size", "agent"), self.names, self.dtype)

    def address_signature(self) -> str:
        """What a plan's numbers depend on besides the layout: addresses, devices, and the agents they are addresses of. An agent's
        metadata is left out: it can be made anew without a byte moving."""
        return self._signature([[one.slot, one.name] for one in self.agents], ("agent", "addr", "device"))

    def _signature(self, agents: object, columns: Sequence[str], *texts: tuple[str, ...]) -> str:
        state = xxhash.xxh3_128(json.dumps([agents, len(self.names), self.shape.shape[1], len(self)]).encode())
        for text in texts:
            state.update("\n".join(text).encode() + b"\0")
        for name in columns:
            state.update(getattr(self, name).tobytes())
        return str(state.hexdigest())

    def check(self) -> None:
        """That the shards of every tensor are its whole, cut up. Equal boxes of several agents are replicas, and fine.

        Raises ManifestMismatch for shards that overlap in part, CoverageError for a gap; both name tensor, box and slots.
        """
        first = _boxes.distinct(self.tensor, self.start, self.size)
        tensor, start, size = self.tensor[first], self.start[first], self.size[first]
        pair = _boxes.overlapping(tensor, start, size)
        if pair is not None:
            one, other = (self._placed(int(first[row])) for row in pair)
            raise ManifestMismatch(
                f"{self.names[int(tensor[pair[0]])]}: {one} and {other} overlap in part; publish each element once, or in equal boxes"
            )
        held = np.zeros(len(self.names), dtype=np.int64)
        np.add.at(held, tensor, _boxes.volumes(size))
        short = np.flatnonzero(held < _boxes.volumes(self.shape))
        if len(short):
            at, mine = int(short[0]), tensor == short[0]
            missing = _boxes.uncovered(self.shape[at].tolist(), start[mine].tolist(), size[mine].tolist()) or ()
            more = f", and {len(short) - 1} more tensors have gaps" if len(short) > 1 else ""
            raise CoverageError(
                f"{self.names[at]} {self.shape[at, : self.ndim[at]].tolist()}: nobody holds the box "
                f"{_boxes.printed(missing[: self.ndim[at]])}{more}; "
                f"publishing slots: {', '.join(one.slot for one in self.agents) or 'none'}"
            )

    def _placed(self, row: int) -> str:
        stop = self.start[row] + self.size[row]
        box = list(zip(self.start[row].tolist(), stop.tolist(), strict=True))[: int(self.ndim[self.tensor[row]])]
        return f"{_boxes.printed(box)} of {self.agents[int(self.agent[row])].slot}"


def _padded(rows: Sequence[tuple[int, ...]], width: int, fill: int) -> Ints:
    padding = (fill,) * width
    return np.array([(*row, *padding[len(row) :]) for row in rows], dtype=np.int64).reshape(len(rows), width)


def _offsets(counts: Iterable[int]) -> Ints:
    given = np.fromiter(counts, dtype=np.int64)
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(given)))


def _described(one: Held) -> str:
    return f"{one.tensor.dtype} {tuple(one.shape)}"
