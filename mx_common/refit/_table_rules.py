"""What must hold between the columns of a shard table, and the message for each rule that does not.

    column = as_column("addr", values, np.uint64)
    check_rules(table)

Invariant: every rule is checked on whole columns, once, where a table is made; code that has a table need not doubt it.
"""

from __future__ import annotations

import collections
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mx_common.errors import ConfigError
from mx_common.refit._boxes import printed
from mx_common.refit._codec import dtype_codes

if TYPE_CHECKING:
    from mx_common.refit.table import ShardTable

__all__ = ["as_column", "check_rules"]

MAX_ITEM_BYTES = 64
MAX_BYTES = float(1 << 62)  # of one tensor: products of sizes stay exact in int64


def as_column(name: str, values: Any, dtype: type) -> npt.NDArray[Any]:
    """`values` as a read-only array of `dtype`; a caller that goes on writing to its own does not reach it."""
    given = np.asarray(values)
    if given.size:
        if given.dtype.kind not in "iu":
            raise ConfigError(f"ShardTable.{name} is a column of whole numbers; got dtype {given.dtype}")
        bounds = np.iinfo(dtype)
        if given.dtype != dtype and not bounds.min <= int(given.min()) <= int(given.max()) <= bounds.max:
            raise ConfigError(
                f"ShardTable.{name} has values from {given.min()} to {given.max()}, which {np.dtype(dtype)} does not hold"
            )
    copied = given.flags.writeable or given.dtype != dtype
    column = np.array(given, dtype=dtype, order="C") if copied else np.ascontiguousarray(given)
    column.setflags(write=False)
    return column


def check_rules(table: ShardTable) -> None:
    """Raises ConfigError for the first rule that does not hold."""
    _check_lengths(table)
    _check_tensors(table)
    _check_agents(table)
    _check_shards(table)
    _check_digests(table)


def _check_lengths(table: ShardTable) -> None:
    tensors, shards = len(table.names), len(table.addr)
    dims = max(1, int(table.ndim.max()) if table.ndim.size else 1)
    wanted = {
        **dict.fromkeys(("itemsize", "ndim"), (tensors,)),
        "shape": (tensors, dims),
        **dict.fromkeys(("tensor", "addr", "device", "agent"), (shards,)),
        **dict.fromkeys(("start", "size"), (shards, dims)),
        "digests": (table.digests.size,),
        "digest_offset": (shards + 1,),
    }
    for name, shape in wanted.items():
        if getattr(table, name).shape != shape:
            raise ConfigError(
                f"ShardTable.{name} has shape {getattr(table, name).shape}; {tensors} tensors of rank {dims} or less "
                f"and {shards} shards need {shape}"
            )
    if len(table.dtype) != tensors:
        raise ConfigError(f"ShardTable.dtype has {len(table.dtype)} entries for {tensors} tensors; give one a tensor")


def _check_tensors(table: ShardTable) -> None:
    if not table.names:
        return
    _check_names(table.names)
    shape, rank = table.shape.T, table.ndim
    padded = np.logical_and.reduce([(column == 1) | (dim < rank) for dim, column in enumerate(shape)])
    _refuse(table, (rank < 0) | ~padded, "is not padded with 1 beyond its rank")
    _refuse(table, np.logical_or.reduce([column < 0 for column in shape]), "has a negative dim")
    known, codes = dtype_codes(table.dtype)
    if not all(known):
        raise ConfigError("a tensor without a dtype; name it as torch does, such as bfloat16")
    sizes = np.zeros(len(known), dtype=np.int64)
    sizes[codes] = table.itemsize
    bad = (table.itemsize < 1) | (table.itemsize > MAX_ITEM_BYTES) | (table.itemsize != sizes[codes])
    _refuse(table, bad, "has another item size than its dtype")
    # as floats, since this is where products that wrap are kept out
    nbytes = functools.reduce(np.multiply, (np.maximum(column, 1).astype(np.float64) for column in shape), table.itemsize)
    _refuse(table, nbytes >= MAX_BYTES, "is larger than any memory")


@functools.lru_cache(maxsize=16)
def _check_names(names: tuple[str, ...]) -> None:
    """Kept for the names that tables of one trainer share: most of what there is to check in a large model."""
    distinct = set(names)
    if len(distinct) != len(names):
        twice = next(name for name, count in collections.Counter(names).items() if count > 1)
        raise ConfigError(f"the tensor {twice} is listed twice; give a tensor one row and each of its boxes one shard")
    joined = "".join(names)
    if "\n" in joined or "" in distinct:
        raise ConfigError(
            "a tensor's name is empty or has a line break in it; give the one it has in the Hugging Face checkpoint"
        )
    if not joined.isascii():
        try:
            joined.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"a tensor's name is not valid Unicode: {error}") from error


def _refuse(table: ShardTable, bad: Any, why: str) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        what = (
            f"{table.dtype[row]} {table.shape[row].tolist()} of rank {table.ndim[row]}, {table.itemsize[row]} bytes an element"
        )
        raise ConfigError(f"{table.names[row]} ({what}) {why}")


def _check_agents(table: ShardTable) -> None:
    for what, values in (("name", [one.name for one in table.agents]), ("slot", [one.slot for one in table.agents])):
        if len(set(values)) != len(values):
            raise ConfigError(
                f"two agents of a shard table have the same {what}: {', '.join(sorted(values))}; each process needs its own"
            )


def _check_shards(table: ShardTable) -> None:
    if not len(table):
        return
    for name, rows, of in (("tensor", len(table.names), "tensors"), ("agent", len(table.agents), "agents")):
        column = getattr(table, name)
        if not 0 <= column.min() <= column.max() < rows:
            raise ConfigError(f"ShardTable.{name} has values from {column.min()} to {column.max()}; there are {rows} {of}")
    inside = np.logical_and.reduce(
        [
            (start >= 0) & (size >= 1) & (start <= shape[table.tensor] - size)
            for start, size, shape in zip(table.start.T, table.size.T, table.shape.T, strict=True)
        ]
    )
    stop = table.addr + table.nbytes
    for bad, why in (
        (
            ~inside,
            "is empty or does not lie inside the tensor; drop empty shards, and give starts in elements of the global tensor",
        ),
        (table.addr == 0, "lies at address 0; take the address of allocated memory"),
        (stop < table.addr, "runs past the end of the address space; check its address"),
    ):
        if bad.any():
            row = int(np.argmax(bad))
            at = int(table.tensor[row])
            box = printed(zip(table.start[row].tolist(), (table.start[row] + table.size[row]).tolist(), strict=True))
            slot = table.agents[int(table.agent[row])].slot
            raise ConfigError(f"shard {row} of {slot}, {table.names[at]} {table.shape[at].tolist()}, box {box} {why}")


def _check_digests(table: ShardTable) -> None:
    blocks = np.diff(table.digest_offset)
    cut = np.maximum(blocks, 1)
    if table.digest_offset[0] != 0 or (blocks < 0).any() or table.digest_offset[-1] != len(table.digests):
        raise ConfigError(
            f"digest offsets run from {table.digest_offset[0]} to {table.digest_offset[-1]} over {len(table.digests)} digests"
        )
    uneven = table.size[:, 0] % cut != 0
    if uneven.any():
        row = int(np.argmax(uneven))
        raise ConfigError(
            f"shard {row} of {table.names[int(table.tensor[row])]} has {table.size[row, 0]} rows and {blocks[row]} digests; "
            "blocks are equal, so their count divides the rows"
        )
