"""`mx server`: the directory as a service of its own, for fleets of more than one machine.

Invariant: ends by itself on SIGINT and SIGTERM, answering what is in flight first.
"""

from __future__ import annotations

import logging
import signal
import threading

import typer

from mx_common.directory.server import DirectoryServer

__all__ = ["command"]


def command(
    address: str = typer.Option("0.0.0.0:8001", "--address", help="host:port to listen on; port 0 takes any free one."),
) -> None:
    """Run the directory. Replicas find it through MX_SERVER_ADDRESS; weights never pass through it.

    gRPC health and reflection are served on the same port. Its records live in memory: after a restart every source registers again
    at its next heartbeat.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with DirectoryServer(address) as running:
        typer.echo(
            f"directory on {running.address}; replicas: export MX_SERVER_ADDRESS=<this host>:{running.address.rpartition(':')[2]}"
        )
        stop.wait()
    typer.echo("directory stopped")
