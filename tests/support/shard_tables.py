"""Shard tables of made-up addresses: by hand, and at random for properties."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import strategies as st

from mx_common.refit import Agent, ShardTable

DTYPES = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "int64": 8}


def agents(count):
    return tuple(Agent(f"tp{n}", f"trainer-{n}", bytes([n]) * n) for n in range(count))


def make(tensors, shards, count=1, **changed):
    """A table of `tensors` {name: (dtype, shape)} and `shards` [(name, start, size, agent, replies)]; addresses are made up."""
    names = tuple(tensors)
    dims = max([1, *(len(shape) for _, shape in tensors.values())])
    pad = lambda row, fill: (*row, *(fill,) * (dims - len(row)))  # noqa: E731
    rows = len(shards)
    fields = {
        "names": names,
        "dtype": tuple(dtype for dtype, _ in tensors.values()),
        "itemsize": np.array([DTYPES[dtype] for dtype, _ in tensors.values()], dtype=np.int64),
        "shape": np.array([pad(shape, 1) for _, shape in tensors.values()], dtype=np.int64).reshape(len(names), dims),
        "ndim": np.array([len(shape) for _, shape in tensors.values()], dtype=np.int64),
        "tensor": np.array([names.index(name) for name, *_ in shards], dtype=np.int64),
        "start": np.array([pad(start, 0) for _, start, *_ in shards], dtype=np.int64).reshape(rows, dims),
        "size": np.array([pad(size, 1) for _, _, size, _ in shards], dtype=np.int64).reshape(rows, dims),
        "addr": 0x7F0000000000 + 0x10000 * np.arange(rows),
        "device": np.zeros(rows, dtype=np.int64),
        "agent": np.array([agent for *_, agent in shards], dtype=np.int64),
        "agents": agents(count),
        "digests": np.zeros(0, dtype=np.int64),
        "digest_offset": np.zeros(rows + 1, dtype=np.int64),
    }
    return ShardTable(**{**fields, **changed})


def two_by_rows(**changed):
    return make({"w": ("bfloat16", (8, 4))}, [("w", (0, 0), (4, 4), 0), ("w", (4, 0), (4, 4), 1)], count=2, **changed)


@st.composite
def cut_up(draw, shape):
    """Boxes (start, size) that are `shape` cut up at random."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(boxes) - 1))
        start, size = boxes[at]
        wide = [dim for dim, n in enumerate(size) if n > 1]
        if not wide:
            continue
        dim = draw(st.sampled_from(wide))
        cut = draw(st.integers(1, size[dim] - 1))
        first = tuple(cut if d == dim else n for d, n in enumerate(size))
        rest = tuple(n - cut if d == dim else n for d, n in enumerate(size))
        moved = tuple(a + cut if d == dim else a for d, a in enumerate(start))
        boxes[at : at + 1] = [(start, first), (moved, rest)]
    return boxes


NAMES = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\n"), min_size=1, max_size=12)
SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@st.composite
def whole_tables(draw, held=False):
    """Tables whose shards are their tensors cut up, in random order over some agents, some boxes on two of them; digests or none.
    `held`: at least one tensor of two elements or more."""
    tensors = draw(st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), max_size=3))
    if held:
        tensors["held"] = ("bfloat16", (draw(st.integers(2, 7)), draw(st.integers(1, 7))))
    count = draw(st.integers(1, 4))
    shards = []
    for name, (_, shape) in tensors.items():
        for start, size in draw(cut_up(shape)):
            for agent in draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=2, unique=True)):
                shards.append((name, start, size, agent))
    shards = draw(st.permutations(shards))
    changed = {}
    if shards and draw(st.booleans()):
        blocks = [n if len(size) and size[0] % n == 0 else 1 for n in [draw(st.integers(1, 3))] for _, _, size, _ in shards]
        changed["digest_offset"] = np.concatenate(([0], np.cumsum(blocks)))
        changed["digests"] = np.array(
            draw(st.lists(st.integers(0, 2**64 - 1), min_size=sum(blocks), max_size=sum(blocks))), np.uint64
        )
        changed["addr"] = np.array(draw(st.lists(st.integers(1, 2**63), min_size=len(shards), max_size=len(shards))), np.uint64)
    return make(tensors, shards, count, **changed)


def fields_equal(one, other):
    return all(
        np.array_equal(a, b) and a.dtype == b.dtype if isinstance(a, np.ndarray) else a == b
        for a, b in ((getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(ShardTable))
    )


def rows_of(table, keep):
    """The same table with only the shards `keep`, without digests."""
    columns = {name: getattr(table, name)[keep] for name in ("tensor", "start", "size", "addr", "device", "agent")}
    offsets = np.zeros(len(columns["addr"]) + 1, dtype=np.int64)
    return dataclasses.replace(table, **columns, digests=np.zeros(0, dtype=np.uint64), digest_offset=offsets)
