"""`mx server`: the directory as a service of its own, for fleets of more than one machine.

Invariant: ends by itself on SIGINT and SIGTERM, answering what is in flight first.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading

import typer

from mx_common import envs
from mx_common.directory.address import Address
from mx_common.directory.server import DirectoryServer, is_address_in_use
from mx_common.directory.store import MemoryStore, Store
from mx_common.errors import ConfigError, DirectoryUnavailable

__all__ = ["command"]

INTERRUPTED = 130


def _address(value: str) -> str:
    try:
        return str(Address.parse(value, what="--address", binding=True))
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def command(
    address: str = typer.Option(
        "0.0.0.0:8001", "--address", callback=_address, help="host:port to listen on; port 0 takes any free one."
    ),
    store: str = typer.Option(
        "memory", "--store", help="Where records live: memory, or redis://HOST:PORT/DB to share them between servers."
    ),
) -> None:
    """Run the directory. Weights never pass through it: it only knows who has them.

    \b
    Examples:
      mx server
      mx server --address 10.0.0.5:8001
      mx server --store redis://10.0.0.9:6379/0
    Then, where the replicas run:
      export MX_SERVER_ADDRESS=10.0.0.5:8001

    gRPC health and reflection answer on the same port. There is no authentication: listen inside the cluster's network only. Records
    in memory are gone after a restart; every source then registers again with its next heartbeat (MX_HEARTBEAT_SECONDS).

    SIGTERM ends it with exit code 0, Ctrl-C with 130.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    received: list[int] = []
    stop = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        received.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    with _started(DirectoryServer(address, _store(store))) as running:
        typer.echo(f"directory serves on {running.address}, records in {store.partition('://')[0]}")
        typer.echo(f"replicas find it with: export MX_SERVER_ADDRESS={_reachable(Address.parse(running.address))}")
        stop.wait()
    typer.echo(f"directory stopped by {signal.Signals(received[0]).name}")
    if received[0] == signal.SIGINT:
        raise typer.Exit(INTERRUPTED)


def _started(server: DirectoryServer) -> DirectoryServer:
    try:
        return server.start()
    except DirectoryUnavailable as error:
        if not is_address_in_use(error.__cause__):
            raise
        raise DirectoryUnavailable(
            f"{error}. `ss -ltnp` shows who listens; if that is a directory already, replicas can use it as it is (`mx sources "
            "--server HOST:PORT` asks it)"
        ) from error


def _store(wanted: str) -> Store:
    stale, remove = envs.STALE_SECONDS.get(), envs.REMOVE_SECONDS.get()
    if wanted == "memory":
        return MemoryStore(stale_seconds=stale, remove_seconds=remove)
    if "://" not in wanted:
        raise typer.BadParameter(f"--store {wanted!a}: write memory, or redis://HOST:PORT/DB")
    from mx_common.directory.redis_store import RedisStore

    try:
        return RedisStore(wanted, stale_seconds=stale, remove_seconds=remove)
    except ImportError as error:
        raise ConfigError(f"--store {wanted!a} needs a Redis client ({error}); pip install 'mx-adapters[redis]'") from error


def _reachable(bound: Address) -> str:
    wildcard = bound.host in ("0.0.0.0", "::")
    return str(Address(socket.gethostname(), bound.port) if wildcard else bound)
