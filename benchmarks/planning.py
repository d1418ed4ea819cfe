"""Time and memory to plan a refit, against a planner that makes one Python object a segment, in the same run.

    python -m benchmarks.planning [--repeat 5] [--json]

The model: 48 layers of 128 experts (gate and up [768, 2048], down [2048, 768], bfloat16; 18,432 matrices), held by rows on 2 agents; the
receiver is one rank of TP=2, gate and up fused by rows into one destination an expert, down by columns. `verified` plans pull whole digest
blocks where a slice cannot be checked; `modelled` ones leave the choice to the cost model, `exact` ones read the minimum. The second model
has 61 layers of 256 experts. The per-segment planner runs on 1 layer and its figures are multiplied by the number of layers (said as
`extrapolated_from_layers`). Times are the best of `--repeat`. `peak_mb` is the most that planning the exact way once holds at a time, plan
included, in a run of its own under tracemalloc, which numpy reports to.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
import tracemalloc
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mx_common.refit.pieces import Pieces
from mx_common.refit.plan import CostModel, Plan, make_plan
from mx_common.refit.table import Agent, ShardTable, row_blocks

HIDDEN, FFN, ITEM = 2048, 768, 2
MODELS = {"48x128": (48, 128), "61x256": (61, 256)}
REMOTE, LOCAL = 1 << 44, 1 << 46
EXACT = CostModel(seconds_per_run=0.0, copy_seconds_per_byte=1.0)


def model(layers: int, experts: int, rank: int = 0) -> tuple[ShardTable, Pieces]:
    """What two agents hold by rows, and what one rank of TP=2 wants."""
    prefixes = [f"model.layers.{layer}.mlp.experts.{expert}" for layer in range(layers) for expert in range(experts)]
    names = tuple(f"{prefix}.{part}_proj.weight" for prefix in prefixes for part in ("gate", "up", "down"))
    count = len(prefixes)
    shape = np.tile(np.array([[FFN, HIDDEN], [FFN, HIDDEN], [HIDDEN, FFN]]), (count, 1))
    half = shape // np.array([2, 1])
    tensors = len(names)
    size, start = np.tile(half, (2, 1)), np.concatenate((np.zeros_like(half), half * np.array([1, 0])))
    nbytes = FFN * HIDDEN * ITEM // 2
    blocks = np.array([row_blocks(int(n), nbytes) for n in size[:, 0]])
    offset = np.concatenate(([0], np.cumsum(blocks)))
    table = ShardTable(
        names=names,
        dtype=("bfloat16",) * tensors,
        itemsize=np.full(tensors, ITEM),
        shape=shape,
        ndim=np.full(tensors, 2),
        tensor=np.tile(np.arange(tensors, dtype=np.int32), 2),
        start=start,
        size=size,
        addr=np.uint64(REMOTE) + np.arange(2 * tensors, dtype=np.uint64) * np.uint64(nbytes),
        device=np.zeros(2 * tensors, dtype=np.uint64),
        agent=np.repeat(np.arange(2, dtype=np.int32), tensors),
        agents=(Agent("rank0", "a"), Agent("rank1", "b")),
        digests=np.zeros(offset[-1], dtype=np.uint64),
        digest_offset=offset,
    )
    pieces = Pieces(
        names=names,
        tensor=np.arange(tensors, dtype=np.int32),
        start=np.tile(np.array([[rank * FFN // 2, 0], [rank * FFN // 2, 0], [0, rank * FFN // 2]]), (count, 1)),
        size=np.tile(np.array([[FFN // 2, HIDDEN], [FFN // 2, HIDDEN], [HIDDEN, FFN // 2]]), (count, 1)),
        # gate, then up right behind it in the fused destination, then down
        addr=np.uint64(LOCAL) + np.arange(tensors, dtype=np.uint64) * np.uint64(nbytes),
        stride=np.tile(np.array([[HIDDEN * ITEM, ITEM], [HIDDEN * ITEM, ITEM], [FFN // 2 * ITEM, ITEM]]), (count, 1)),
        itemsize=np.full(tensors, ITEM),
        device=np.zeros(tensors, dtype=np.uint64),
    )
    return table, pieces


class Segment(NamedTuple):
    agent: int
    remote_addr: int
    local_addr: int
    length: int


def per_segment(table: ShardTable, pieces: Pieces) -> list[Segment]:
    """The planner as one would write it down: for every piece the shards of its tensor, the overlap, and a segment for each of its rows."""
    held: dict[str, list[tuple[int, int, list[int], list[int]]]] = {}
    columns = (table.tensor.tolist(), table.agent.tolist(), table.addr.tolist(), table.start.tolist(), table.size.tolist())
    for tensor, agent, addr, start, size in zip(*columns, strict=True):
        held.setdefault(table.names[tensor], []).append((agent, addr, start, size))
    segments = []
    wanted = (pieces.tensor.tolist(), pieces.addr.tolist(), pieces.start.tolist(), pieces.size.tolist(), pieces.stride.tolist())
    for tensor, local, start, size, stride in zip(*wanted, strict=True):
        for agent, addr, from_, extent in held[pieces.names[tensor]]:
            low = [max(a, b) for a, b in zip(start, from_, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(start, size, from_, extent, strict=True)]
            if low[0] >= high[0] or low[1] >= high[1]:
                continue
            length = (high[1] - low[1]) * ITEM
            for row in range(low[0], high[0]):
                remote_addr = addr + ((row - from_[0]) * extent[1] + low[1] - from_[1]) * ITEM
                local_addr = local + (row - start[0]) * stride[0] + (low[1] - start[1]) * stride[1]
                last = segments[-1] if segments else None
                if (
                    last is not None
                    and last.agent == agent
                    and last.remote_addr + last.length == remote_addr
                    and last.local_addr + last.length == local_addr
                ):
                    segments[-1] = last._replace(length=last.length + length)
                else:
                    segments.append(Segment(agent, remote_addr, local_addr, length))
    return segments


def best(action: Callable[[], object], repeat: int) -> float:
    seconds = math.inf
    for _ in range(repeat):
        start = time.perf_counter()
        action()
        seconds = min(seconds, time.perf_counter() - start)
    return seconds


def figures(plan: Plan, seconds: float) -> dict[str, object]:
    return {
        "seconds": round(seconds, 4),
        "wire_over_minimum": round(plan.wire_bytes / plan.minimum_bytes, 4),
        "rows": len(plan.reads) + len(plan.pulls),
        "descriptors": plan.descriptors,
        "choice": plan.choice,
    }


def check_same_bytes(plan: Plan, segments: list[Segment]) -> None:
    """An exact plan spelled out has to be the per-segment one, or the two times mean nothing."""
    ours = []
    for agent in (0, 1):
        for part in plan.reads.expanded(agent):
            columns = (column.tolist() for column in part[:3])
            ours += [Segment(agent, *row) for row in zip(*columns, strict=True)]
    if sum(one.length for one in ours) != sum(one.length for one in segments):
        raise SystemExit("the two planners read different numbers of bytes")
    # a planner that joins neighbours across tensors has fewer rows: compare where every run of a down projection begins
    begins = {(one.agent, one.remote_addr, one.local_addr) for one in ours}
    if not begins >= {(one.agent, one.remote_addr, one.local_addr) for one in segments}:
        raise SystemExit("the two planners read from different places")


def measure(repeat: int) -> dict[str, object]:
    result: dict[str, object] = {}
    table, pieces = model(1, 128)
    segments = per_segment(table, pieces)
    check_same_bytes(make_plan(table, pieces, cost=EXACT, verify=False), segments)
    layer_seconds = best(lambda: per_segment(table, pieces), 1)
    for name, (layers, experts) in MODELS.items():
        table, pieces = model(layers, experts)
        rows: dict[str, object] = {"matrices": len(table.names), "shards": len(table)}
        ways = {"verified": (CostModel(), True), "modelled": (CostModel(), False), "exact": (EXACT, False)}
        times = {}
        for way, (cost, verify) in ways.items():
            action = functools.partial(make_plan, table, pieces, cost=cost, verify=verify)
            times[way] = best(action, repeat)
            rows[way] = figures(action(), times[way])
        rows["peak_mb"] = round(peak_bytes(functools.partial(make_plan, table, pieces, cost=EXACT, verify=False)) / 1e6, 1)
        scale = layers * experts / 128
        rows["per_segment"] = {
            "extrapolated_from_layers": 1,
            "seconds": round(layer_seconds * scale, 2),
            "segments": int(len(segments) * scale),
            "over_exact": round(layer_seconds * scale / times["exact"]),
        }
        result[name] = rows
    return result


def peak_bytes(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        kept = action()
        peak = tracemalloc.get_traced_memory()[1]
        del kept
    finally:
        tracemalloc.stop()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    print(json.dumps(measure(given.repeat)))


if __name__ == "__main__":
    main()
