"""Records of runs that never were, for pages and tests: four ranks that follow a trainer, one of them behind a slow rail, and replicas
that load from each other."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mx_common.floor import INSTALLED_SCHEMA, SCHEMA

FLOOR, CEILING = 100.0, 400.0
BYTES = 16_060_522_496


def refits(ranks: int = 8, steps: int = 40, *, seed: int = 7, model: str = "org/model-8b") -> Iterator[dict[str, Any]]:
    """Rank 5 is slow from the middle on: its second source's rail runs at a third."""
    dice = random.Random(seed)
    for step in range(1, steps + 1):
        for rank in range(ranks):
            ill = rank == 5 and step > steps // 2
            host = f"node{rank // 4}"
            rates = [dice.gauss(96, 4), dice.gauss(96, 4) / (3 if ill else 1)]
            seconds = [BYTES / 2 * 8 / rate / 1e9 for rate in rates]
            took = max(seconds)
            rate = round(BYTES * 8 / took / 1e9, 1)
            common = {
                "path": "reshard",
                "engine": "vllm",
                "model": model,
                "version": step,
                "rank": rank,
                "world": ranks,
                "host": host,
            }
            common |= {"step": step, "worker_id": f"engine-{rank:04x}"}
            stages = {"wait": dice.uniform(0.02, 0.06), "plan": 0.9 if step == 1 else 0.011, "wire": took}
            stages |= {"verify": 0.21 + dice.uniform(0, 0.02), "check": 0.03, "land": 0.0}
            yield {
                **common,
                "schema": SCHEMA,
                "framework": "fsdp",
                "verdict": "slow" if rate < FLOOR else "ok",
                "reason": None,
                "armed": True,
                "floor": FLOOR,
                "ceiling": CEILING,
                "wire_bytes": BYTES,
                "wire_s": round(took, 6),
                "implied_gbps": rate,
                "descriptors": 1164,
                "transport": f"ucx:rdma:mlx5_{rank % 4}",
                "policy": "balanced",
                "peers": [
                    {"source": f"rank{(rank + n) % 4}", "wire_bytes": BYTES // 2, "wire_s": round(one, 6)}
                    for n, one in enumerate(seconds)
                ],
                "verified": True,
                "stages_s": {name: round(value, 6) for name, value in stages.items()},
            }
            stages["install"] = 0.045 + 0.01 * math.sin(step)
            yield {**common, "schema": INSTALLED_SCHEMA, "stages_s": {name: round(value, 6) for name, value in stages.items()}}


def loads(replicas: int = 5, *, seed: int = 3, model: str = "org/model-8b") -> Iterator[dict[str, Any]]:
    """Replicas that start one after another; the last finds only a TCP way to its source."""
    dice = random.Random(seed)
    for replica in range(replicas):
        tcp = replica == replicas - 1
        rate = dice.gauss(24, 1) if tcp else dice.gauss(188, 5)
        took = BYTES * 8 / rate / 1e9
        source = f"{dice.getrandbits(128):032x}"
        yield {
            "schema": SCHEMA,
            "path": "load",
            "engine": "vllm",
            "framework": "vllm",
            "model": model,
            "version": "main",
            "rank": 0,
            "world": 1,
            "host": f"node{replica + 2}",
            "step": 0,
            "verdict": "slow" if tcp else "ok",
            "reason": None,
            "armed": True,
            "floor": FLOOR,
            "ceiling": CEILING,
            "wire_bytes": BYTES,
            "wire_s": round(took, 6),
            "implied_gbps": round(rate, 1),
            "descriptors": 290,
            "transport": "ucx:tcp" if tcp else "ucx:rdma:mlx5_0",
            "policy": "balanced",
            "peers": [{"source": source, "wire_bytes": BYTES, "wire_s": round(took, 6)}],
            "stages_s": {"plan": 0.03, "connect": 0.12, "wire": round(took, 6), "verify": 0.4},
        }


def write(path: Path, *runs: Iterator[dict[str, Any]]) -> Path:
    """A file of records."""
    path.write_text("".join(json.dumps(record) + "\n" for run in runs for record in run))
    return path
