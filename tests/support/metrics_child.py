"""A process that counts, and shows it on the metrics page of its host: `python -u -m tests.support.metrics_child RANK`.

It knows `count N` (attempts that were ok), `fork` (a child that serves as rank 9 and counts 100), `serve` (again) and `threads`. Each
answer is one line that begins with the command.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

from mx_common import metrics


def fork():
    child = os.fork()
    if child:
        return str(child)
    metrics.LOAD_ATTEMPTS.add(100, outcome="ok")  # before it is seen
    metrics.serve(rank=9)
    print("child", os.getpid())
    while True:
        signal.pause()


def count(number):
    metrics.LOAD_ATTEMPTS.add(int(number), outcome="ok")
    return number


def serve():
    metrics.serve()
    return ""


def threads():
    names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("mx-metrics"))
    return f"{','.join(names)} {'prometheus_client' in sys.modules}"


def main():
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
    metrics.serve(rank=int(sys.argv[1]))
    print("started", os.getpid())
    for line in sys.stdin:
        name, *arguments = line.split()
        print(name, globals()[name](*arguments))


if __name__ == "__main__":
    main()
