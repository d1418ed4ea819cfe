"""One shard table out of those of all trainer ranks.

    whole = merged([table_of_tp0, table_of_tp1])

Tensors keep the order in which they first appear, shards that of the tables. Ranks that list the same names, as tensor-parallel ones do,
are joined without a look at a single name.

Invariant: a tensor has one shape and one dtype whoever holds it, and no agent is joined twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mx_common.errors import ManifestMismatch
from mx_common.refit._codec import dtype_codes, dtype_names

if TYPE_CHECKING:
    from mx_common.refit.table import ShardTable

__all__ = ["merged_fields"]

Ints = npt.NDArray[np.int64]


def merged_fields(tables: Sequence[ShardTable]) -> dict[str, Any]:
    """The fields of the joined table. Raises ManifestMismatch naming the tensor and both slots that disagree on it, or the agent that
    appears twice."""
    _check_agents(tables)
    names, places = _joined_names([table.names for table in tables])
    tensors = _joined_tensors(tables, names, places)
    dims = tensors["shape"].shape[1]
    first_agents = itertools.accumulate((len(table.agents) for table in tables), initial=0)
    first_digests = itertools.accumulate((len(table.digests) for table in tables), initial=0)
    fields = {
        **tensors,
        "names": names,
        "tensor": np.concatenate([at.astype(np.int32)[table.tensor] for table, at in zip(tables, places, strict=True)]),
        "start": np.concatenate([_widened(table.start, dims, 0) for table in tables]),
        "size": np.concatenate([_widened(table.size, dims, 1) for table in tables]),
        "addr": np.concatenate([table.addr for table in tables]),
        "device": np.concatenate([table.device for table in tables]),
        "agent": np.concatenate([table.agent + np.int32(first) for table, first in zip(tables, first_agents, strict=False)]),
        "agents": tuple(agent for table in tables for agent in table.agents),
        "digests": np.concatenate([table.digests for table in tables]),
        "digest_offset": np.concatenate(
            [np.zeros(1, dtype=np.int64)]
            + [table.digest_offset[1:] + first for table, first in zip(tables, first_digests, strict=False)]
        ),
    }
    for column in fields.values():
        if isinstance(column, np.ndarray):
            column.setflags(write=False)
    return fields


def _check_agents(tables: Sequence[ShardTable]) -> None:
    names: dict[str, str] = {}
    slots: dict[str, str] = {}
    for agent in (agent for table in tables for agent in table.agents):
        if agent.slot in slots:
            raise ManifestMismatch(
                f"slot {agent.slot} is published by two agents, {slots[agent.slot]} and {agent.name}; merge one table a slot, the newest"
            )
        if agent.name in names:
            raise ManifestMismatch(
                f"slots {names[agent.name]} and {agent.slot} have the same agent name {agent.name}; give every trainer process its own"
            )
        names[agent.name], slots[agent.slot] = agent.slot, agent.name


def _joined_names(lists: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], list[Ints]]:
    """All names once, and for each list the places of its own among them."""
    first = lists[0]
    index: dict[str, int] = {}
    places = [np.arange(len(first))]
    for names in lists[1:]:
        if names == first:
            places.append(places[0])
            continue
        if not index:
            index = dict(zip(first, itertools.count(), strict=False))
        fresh = [name for name in names if name not in index]
        index.update(zip(fresh, itertools.count(len(index)), strict=False))
        places.append(np.fromiter(map(index.__getitem__, names), dtype=np.int64, count=len(names)))
    return tuple(index) or first, places


def _joined_tensors(tables: Sequence[ShardTable], names: tuple[str, ...], places: Sequence[Ints]) -> dict[str, Any]:
    """The columns of the tensors. A tensor's are those of the first table that lists it; the others must agree."""
    if all(_lists_the_same_tensors(tables[0], table) for table in tables[1:]):
        return {name: getattr(tables[0], name) for name in ("dtype", "itemsize", "ndim", "shape")}
    dims = max(table.shape.shape[1] for table in tables)
    owner = np.full(len(names), -1, dtype=np.int64)
    columns = np.zeros((len(names), 3 + dims), dtype=np.int64)  # dtype code, item size, rank, shape: compared in one go
    known: dict[str, int] = {}
    for number, (table, at) in enumerate(zip(tables, places, strict=True)):
        own, codes = dtype_codes(table.dtype)
        shared = np.array([known.setdefault(name, len(known)) for name in own], dtype=np.int64)
        code = shared[codes] if len(own) else codes
        mine = np.column_stack((code, table.itemsize, table.ndim, _widened(table.shape, dims, 1)))
        fresh = owner[at] < 0
        differs = ~fresh & (columns[at] != mine).any(axis=1)
        if differs.any():
            row = int(at[np.argmax(differs)])
            _refuse(names[row], tables[int(owner[row])], table)
        columns[at], owner[at] = mine, np.where(fresh, number, owner[at])
    return {
        "dtype": dtype_names(tuple(known), columns[:, 0]),
        "itemsize": np.ascontiguousarray(columns[:, 1]),
        "ndim": np.ascontiguousarray(columns[:, 2]),
        "shape": np.ascontiguousarray(columns[:, 3:]),
    }


def _lists_the_same_tensors(one: ShardTable, other: ShardTable) -> bool:
    return (
        one.names == other.names
        and one.dtype == other.dtype
        and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("itemsize", "ndim", "shape"))
    )


def _refuse(name: str, first: ShardTable, second: ShardTable) -> None:
    views = " and ".join(f"{_holder(table, name)} publishes it as {_described(table, name)}" for table in (first, second))
    raise ManifestMismatch(f"{name}: {views}; a tensor's global shape and dtype are the same on every rank")


def _holder(table: ShardTable, name: str) -> str:
    rows = np.flatnonzero(table.tensor == table.names.index(name))
    agent = int(table.agent[rows[0]]) if len(rows) else 0
    return table.agents[agent].slot if table.agents else "an unnamed slot"


def _described(table: ShardTable, name: str) -> str:
    at = table.names.index(name)
    return f"{table.dtype[at]} {table.shape[at, : table.ndim[at]].tolist()}"


def _widened(column: Ints, dims: int, fill: int) -> Ints:
    missing = dims - column.shape[1]
    return np.pad(column, ((0, 0), (0, missing)), constant_values=fill) if missing else column
