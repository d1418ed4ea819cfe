"""Time to order sources, per policy, against a straightforward implementation measured in the same run.

    python benchmarks/ordering.py [--candidates 10000] [--repeat 15] [--json]

The straightforward implementation is the policy as one would write it down: score each candidate with a function, sort the
pairs. Both sides are checked to give the same order before they are timed (`random` excepted). Times are the best of
`--repeat`, in milliseconds, with the two sides taking turns, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mx_common._policies import Balanced, LoadAware, Random, RendezvousHash, TopologyAware
from mx_common.selection import Candidate, Target
from mx_common.topology import shared_depth

LEVELS = ("region", "zone", "datacenter", "block", "rack", "host", "numa")
LOCAL = {"region": "us-east", "zone": "a", "block": "b1", "rack": "r2", "host": "node3"}


@dataclass(frozen=True)
class Row:
    """One policy's times in milliseconds."""

    policy: str
    ms: float
    straightforward_ms: float

    @property
    def ratio(self) -> float:
        return self.ms / self.straightforward_ms


def fleet(count: int, seed: int = 7) -> list[Candidate]:
    """Candidates as a directory lists them: some without load, most without NUMA node."""
    rng = random.Random(seed)
    return [
        Candidate(
            mx_source_id=f"{rng.getrandbits(64):016x}",
            worker_id=f"{rng.getrandbits(128):032x}",
            worker_rank=0,
            topology={
                "region": "us-east",
                "zone": rng.choice("ab"),
                "block": f"b{rng.randrange(4)}",
                "rack": f"r{rng.randrange(8)}",
                "host": f"node{rng.randrange(16)}",
            },
            source_load=rng.choice((None, rng.random())),
        )
        for _ in range(count)
    ]


def digest(candidate: Candidate, target: Target) -> int:
    fields = (
        target.model_name,
        target.worker_id,
        str(target.worker_rank),
        candidate.mx_source_id,
        candidate.worker_id,
        str(candidate.worker_rank),
    )
    return int.from_bytes(hashlib.blake2b("|".join(fields).encode("utf-8"), digest_size=8).digest(), "big")


def load(candidate: Candidate) -> float:
    value = candidate.source_load
    return 0.5 if value is None or not math.isfinite(value) else min(max(value, 0.0), 1.0)


def plain_random(candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
    shuffled = list(candidates)
    random.Random().shuffle(shuffled)
    return shuffled


def plain_rendezvous_hash(candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
    return sorted(candidates, key=lambda c: digest(c, target), reverse=True)


def plain_load_aware(candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
    return sorted(candidates, key=lambda c: digest(c, target) / 2**64 - load(c), reverse=True)


def plain_topology_aware(candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
    def key(c: Candidate) -> tuple[int, float]:
        return shared_depth(c.topology, LOCAL, LEVELS), digest(c, target) / 2**64 - load(c)

    return sorted(candidates, key=key, reverse=True)


def plain_balanced(candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
    """Without its spill, which this fleet's tiers do not need."""

    def key(c: Candidate) -> tuple[int, float]:
        unit = min(max(digest(c, target) / 2**64, 2.0**-64), 1 - 2.0**-53)
        return shared_depth(c.topology, LOCAL, LEVELS), -(max(1 - load(c), 0.01) ** 2) / math.log(unit)

    ordered = sorted(candidates, key=key, reverse=True)
    first = ordered[0].topology
    narrowest = shared_depth(first, first, LEVELS)
    outside = next((i for i, c in enumerate(ordered) if shared_depth(first, c.topology, LEVELS) < narrowest), 0)
    if outside > 2:
        ordered.insert(2, ordered.pop(outside))
    return ordered


Order = Callable[[Sequence[Candidate], Target], list[Candidate]]


def best_ms(order: Order, candidates: Sequence[Candidate], target: Target, best: float) -> float:
    start = time.perf_counter()
    order(candidates, target)
    return min(best, (time.perf_counter() - start) * 1e3)


def measure(count: int, repeat: int) -> list[Row]:
    target = Target("deepseek-ai/DeepSeek-V3", "58f0d01b44488cc527f05ae77aff7da8", 0)
    candidates = fleet(count)
    pairs = (
        (Random(), plain_random),
        (RendezvousHash(), plain_rendezvous_hash),
        (LoadAware(weight=1.0), plain_load_aware),
        (TopologyAware(weight=1.0, local=LOCAL, level_names=LEVELS), plain_topology_aware),
        (Balanced(local=LOCAL, level_names=LEVELS), plain_balanced),
    )
    rows = []
    for policy, plain in pairs:
        if policy.name != "random" and policy.order(candidates, target) != plain(candidates, target):
            raise SystemExit(f"{policy.name}: the two implementations order differently")
        ours = theirs = math.inf
        for _ in range(repeat):
            ours = best_ms(policy.order, candidates, target, ours)
            theirs = best_ms(plain, candidates, target, theirs)
        rows.append(Row(policy.name, ours, theirs))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = measure(given.candidates, given.repeat)
    if given.json:
        result = {r.policy: {"ms": r.ms, "straightforward_ms": r.straightforward_ms, "ratio": r.ratio} for r in rows}
        print(json.dumps({"candidates": given.candidates, "policies": result}))
        return
    print(f"{'policy':<18}{'ms':>8}{'straightforward ms':>21}{'ratio':>8}   ({given.candidates} candidates)")
    for row in rows:
        print(f"{row.policy:<18}{row.ms:>8.2f}{row.straightforward_ms:>21.2f}{row.ratio:>8.2f}")


if __name__ == "__main__":
    main()
