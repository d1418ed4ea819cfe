"""CPU time of a READY source that nobody reads, as a share of one core.

    python -m benchmarks.idle_source [--seconds 20] [--json]

The source serves 256 MiB in 500 tensors, heartbeats every 30 s as by default, and hosts nothing else. Its transport runs no progress
thread; one of ours looks for readers once in three seconds. Beside it runs a control that only wakes twice a second: virtual machines
charge a process for waking up and for touching its memory again, and that part is not ours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import psutil

from benchmarks._fleet import source

CONTROL = "import time, torch, grpc\nwhile True: time.sleep(0.5)"


def measure(seconds: float) -> dict[str, float]:
    """Shares of a core in [0, 1] between two looks at the processes' CPU time."""
    with source(500, (256 << 20) // 500) as (_, pid), subprocess.Popen([sys.executable, "-c", CONTROL]) as control:
        processes = [psutil.Process(pid), psutil.Process(control.pid)]
        time.sleep(8)  # the control has imported what it imports
        before, start = [used(process) for process in processes], time.perf_counter()
        time.sleep(seconds)
        after, stop = [used(process) for process in processes], time.perf_counter()
        control.kill()
    ours, sleeper = (round((now - then) / (stop - start), 4) for now, then in zip(after, before, strict=True))
    return {"seconds": round(stop - start, 1), "share_of_a_core": ours, "share_of_a_control_that_only_wakes": sleeper}


def used(process: psutil.Process) -> float:
    """Seconds of CPU time so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    print(json.dumps(measure(given.seconds)))


if __name__ == "__main__":
    main()
