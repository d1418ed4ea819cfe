"""Ranks of one trainer, each a process forked before torch has made threads, so that one import serves them all.

For children that are scripts: their own folder is where Python looks first.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback


def run_ranks(world, main):
    """`main(rank)` in `world` processes with a rendezvous of their own on loopback. Exits when one fails: the others would wait for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            os.environ.update(
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
            )
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            status = 1
            try:
                main(rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        children.append(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank of {world} failed")
