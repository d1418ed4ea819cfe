"""Which directory a command asks, and what it says when nobody answers.

    with asking(server) as client:
        listing = client.list_sources()

Invariant: a command only looks. It never hosts the embedded directory, and gives up after a few seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from mx_common import envs
from mx_common.directory.address import Address
from mx_common.directory.client import DirectoryClient
from mx_common.errors import ConfigError, DirectoryError, DirectoryUnavailable

__all__ = ["SERVER", "asking", "directory_address", "is_embedded", "name_absence", "patience", "server_option"]

PATIENCE_SECONDS = 3.0


def server_option(value: str | None) -> str | None:
    """Callback of `--server`: a malformed address is wrong usage."""
    if value:
        try:
            Address.parse(value, what="--server")
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error
    return value


SERVER = typer.Option(
    None,
    "--server",
    callback=server_option,
    help="host:port of the directory. [default: MX_SERVER_ADDRESS, else the embedded one]",
)
"""`--server` of commands that watch a directory."""


def is_embedded(server: str | None) -> bool:
    """Whether it is the embedded directory that is asked."""
    return not server and not envs.SERVER_ADDRESS.get()


def directory_address(server: str | None) -> str:
    """The directory to ask: the option, else the environment, else the embedded one. Raises ConfigError naming the variable."""
    if server:
        return str(Address.parse(server, what="--server"))
    variable = envs.EMBEDDED_ADDRESS if is_embedded(server) else envs.SERVER_ADDRESS
    return str(Address.parse(variable.get(), what=variable.name))


def patience() -> float:
    """Seconds that a person waits for one answer."""
    return min(PATIENCE_SECONDS, envs.RPC_TIMEOUT.get())


@contextlib.contextmanager
def asking(server: str | None) -> Iterator[DirectoryClient]:
    """A client for a person who waits. Errors of calls in the block say what an embedded directory that nobody hosts means."""
    with DirectoryClient(directory_address(server), timeout=patience()) as client:
        try:
            yield client
        except DirectoryUnavailable as error:
            raise name_absence(error, server) from error


def name_absence(error: DirectoryError, server: str | None) -> DirectoryError:
    """The error, and for an embedded directory what its absence means."""
    if not isinstance(error, DirectoryUnavailable) or not is_embedded(server):
        return error
    return DirectoryUnavailable(
        f"no directory on {directory_address(server)}: no replica with the embedded one runs on this machine. Start one with "
        f"--load-format mx, or set {envs.SERVER_ADDRESS.name} (or --server) to the directory your fleet uses ({error})"
    )
