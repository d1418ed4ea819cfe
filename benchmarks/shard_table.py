"""The shard table of a large mixture of experts: written, read, merged and checked as columns, against JSON of the same content.

    python -m benchmarks.shard_table [--layers 48] [--experts 128] [--json]

Gate, up and down of every expert, each cut by rows over two agents, without digests on either side. The whole table is written and read
as one, and merged from those of its two agents; "apart" is the two agents' tables, each written alone and both read by one receiver. JSON
has one object a shard; writing starts from such objects and reading ends at them, so that only JSON itself is timed, though our reading
also checks what it reads. JSON's merging groups shards by tensor and checks what ours does: one shape and dtype a tensor, boxes inside it,
sound addresses, different agents. Nothing is remembered from one repetition to the next. Seconds are the best of several.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mx_common.refit import Agent, ShardTable, _codec, _table_rules

HIDDEN, INTERMEDIATE = 2048, 768
AGENTS = 2
Rows = list[dict[str, Any]]


def agent_table(layers: int, experts: int, number: int) -> ShardTable:
    """What agent `number` holds: its rows of every expert matrix."""
    kinds = (("gate", INTERMEDIATE, HIDDEN), ("up", INTERMEDIATE, HIDDEN), ("down", HIDDEN, INTERMEDIATE))
    names = tuple(
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight"
        for layer in range(layers)
        for expert in range(experts)
        for kind, _, _ in kinds
    )
    shape = np.tile(np.array([kind[1:] for kind in kinds]), (layers * experts, 1))
    size = shape // (AGENTS, 1)
    count = len(names)
    nbytes = size.prod(axis=1) * 2
    return ShardTable(
        names=names,
        dtype=("bfloat16",) * count,
        itemsize=np.full(count, 2),
        shape=shape,
        ndim=np.full(count, 2),
        tensor=np.arange(count),
        start=size * (number, 0),
        size=size,
        addr=0x7F0000000000 + number * (1 << 40) + np.cumsum(nbytes) - nbytes,
        device=np.zeros(count, dtype=np.int64),
        agent=np.zeros(count, dtype=np.int64),
        agents=(Agent(f"tp{number}", f"trainer-{number}", bytes(600)),),
        digests=np.zeros(0, dtype=np.uint64),
        digest_offset=np.zeros(count + 1, dtype=np.int64),
    )


def json_rows(table: ShardTable) -> Rows:
    """The same content as objects, one a shard."""
    agent = table.agents[0].slot
    columns = (table.tensor, table.start, table.size, table.addr, table.device)
    return [
        {
            "name": table.names[at],
            "dtype": table.dtype[at],
            "shape": table.shape[at].tolist(),
            "start": start,
            "size": size,
            "addr": addr,
            "device": device,
            "agent": agent,
        }
        for at, start, size, addr, device in zip(*(column.tolist() for column in columns), strict=True)
    ]


def json_merged(tables: Sequence[Rows]) -> dict[str, Any]:
    """Shards by tensor."""
    agents: set[str] = set()
    tensors: dict[str, Any] = {}
    for rows in tables:
        mine = {row["agent"] for row in rows}
        if mine & agents:
            raise ValueError(f"the agents {mine & agents} appear twice")
        agents |= mine
        for row in rows:
            known = tensors.setdefault(row["name"], {"dtype": row["dtype"], "shape": row["shape"], "shards": []})
            if (known["dtype"], known["shape"]) != (row["dtype"], row["shape"]):
                raise ValueError(f"{row['name']} has two shapes or dtypes")
            if not all(0 <= at < at + n <= whole for at, n, whole in zip(row["start"], row["size"], row["shape"], strict=True)):
                raise ValueError(f"{row['name']} has a shard outside it")
            elements = 1
            for n in row["size"]:
                elements *= n
            if not 0 < row["addr"] < row["addr"] + 2 * elements < 1 << 64:
                raise ValueError(f"{row['name']} has a shard at no address")
            known["shards"].append({key: row[key] for key in ("start", "size", "addr", "device", "agent")})
    return tensors


def measure(layers: int = 48, experts: int = 128, repeat: int = 7) -> dict[str, Any]:
    """Best of `repeat`, seconds and bytes, and the ratios of JSON to ours."""
    tables = [agent_table(layers, experts, number) for number in range(AGENTS)]
    whole = ShardTable.merged(tables)
    manifest, apart = whole.encode(), [table.encode() for table in tables]
    by_agent = [json_rows(table) for table in tables]
    rows = [row for one in by_agent for row in one]
    text = json.dumps(rows).encode()
    if ShardTable.merged(ShardTable.decode(one) for one in apart).encode() != manifest or len(whole) != len(rows):
        raise AssertionError("what is measured does not hold the same content")

    def best(action: Callable[[Any], object], before: Callable[[], object] = lambda: None) -> float:
        return round(min(_timed(action, before) for _ in range(repeat)), 5)

    result: dict[str, Any] = {
        "tensors": len(whole.names),
        "shards": len(whole),
        "write_s": best(lambda _: whole.encode()),
        "read_s": best(lambda _: ShardTable.decode(manifest)),
        "merge_s": best(ShardTable.merged, lambda: [ShardTable.decode(one) for one in apart]),
        "check_s": best(lambda _: whole.check()),
        "write_apart_s": round(sum(best(lambda _, table=table: table.encode()) for table in tables), 5),
        "read_apart_s": best(lambda _: [ShardTable.decode(one) for one in apart]),
        "bytes": len(manifest),
        "bytes_apart": sum(map(len, apart)),
        "json_write_s": best(lambda _: json.dumps(rows).encode()),
        "json_read_s": best(lambda _: json.loads(text)),
        "json_merge_s": best(lambda _: json_merged(by_agent)),
        "json_bytes": len(text),
    }
    for ours in ("write_s", "write_apart_s", "read_s", "read_apart_s", "merge_s", "bytes", "bytes_apart"):
        result[f"json_over_{ours.removesuffix('_s')}"] = round(result[f"json_{ours.replace('_apart', '')}"] / result[ours], 1)
    return result


def _timed(action: Callable[[Any], object], before: Callable[[], object]) -> float:
    for kept in (_codec._deflated, _codec._inflated, _table_rules._check_names):
        kept.cache_clear()
    given = before()
    start = time.perf_counter()
    action(given)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    print(json.dumps(measure(given.layers, given.experts)))


if __name__ == "__main__":
    main()
