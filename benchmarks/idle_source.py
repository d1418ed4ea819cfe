"""CPU time of a READY source that nobody reads, as a share of one core.

    python -m benchmarks.idle_source [--seconds 20] [--json]

The source serves 256 MiB in 500 tensors, heartbeats every 30 s as by default, and hosts nothing else. Its transport runs no progress
thread; one of ours looks for readers a few times a second.
"""

from __future__ import annotations

import argparse
import json
import time

import psutil

from benchmarks._fleet import source


def measure(seconds: float) -> dict[str, float]:
    """Share of a core in [0, 1] between two looks at the process's CPU time."""
    with source(500, (256 << 20) // 500) as (_, pid):
        process = psutil.Process(pid)
        time.sleep(3)
        before, start = process.cpu_times(), time.perf_counter()
        time.sleep(seconds)
        after, stop = process.cpu_times(), time.perf_counter()
    used = after.user + after.system - before.user - before.system
    return {"seconds": round(stop - start, 1), "share_of_a_core": round(used / (stop - start), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    print(json.dumps(measure(given.seconds)))


if __name__ == "__main__":
    main()
