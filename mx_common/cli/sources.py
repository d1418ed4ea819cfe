"""`mx sources`: what the directory knows, as a table.

Invariant: only looks. It never hosts the embedded directory: when nobody does, it says so.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from mx_common import envs
from mx_common.directory.client import DirectoryClient, Listing
from mx_common.errors import DirectoryUnavailable
from mx_common.wire import p2p

__all__ = ["SourceRow", "asking", "command", "directory_address", "fetch"]

PATIENCE_SECONDS = 3.0

STATUS_WORDS = {
    p2p.SOURCE_STATUS_UNKNOWN: "UNKNOWN",
    p2p.SOURCE_STATUS_INITIALIZING: "INITIALIZING",
    p2p.SOURCE_STATUS_READY: "READY",
    p2p.SOURCE_STATUS_STALE: "STALE",
}


@dataclass(frozen=True)
class SourceRow:
    """One source for display; `age_s` by the directory's clock, None when it does not tell its time."""

    model: str
    rank: int
    status: str
    source_load: float | None
    topology: dict[str, str]
    age_s: float | None
    readers: int | None
    accelerator: str
    worker_id: str
    mx_source_id: str


def directory_address(server: str | None) -> str:
    """The directory to ask: the option, else the environment, else the embedded one."""
    return server or envs.SERVER_ADDRESS.get() or envs.EMBEDDED_ADDRESS.get()


@contextlib.contextmanager
def asking(server: str | None) -> Iterator[DirectoryClient]:
    """A client for a person who waits: it gives up early, and says what an embedded directory that nobody hosts means."""
    address = directory_address(server)
    with contextlib.closing(DirectoryClient(address, timeout=min(PATIENCE_SECONDS, envs.RPC_TIMEOUT.get()))) as client:
        try:
            yield client
        except DirectoryUnavailable as error:
            if server or envs.SERVER_ADDRESS.get():
                raise
            raise DirectoryUnavailable(
                f"no directory on {address}: no replica runs on this machine with the embedded one. Start one with --load-format mx, or "
                f"set MX_SERVER_ADDRESS to the directory your fleet uses ({error})"
            ) from error


def fetch(client: DirectoryClient, model: str | None = None) -> list[SourceRow]:
    """Every source, of one model or all, by model, rank and worker."""
    rows = []
    for status, word in STATUS_WORDS.items():
        listing = client.list_sources(status=status, model_name=model)
        rows += [_row(ref, word, listing) for ref in listing.instances]
    return sorted(rows, key=lambda row: (row.model, row.mx_source_id, row.rank, row.worker_id))


def command(
    model: str = typer.Option(None, "--model", help="Only sources of this model."),
    server: str = typer.Option(
        None, "--server", help="host:port of the directory. [default: MX_SERVER_ADDRESS, else the embedded one]"
    ),
    watch: bool = typer.Option(False, "--watch", help="Refresh every two seconds until interrupted."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON; with --watch, one document a line."),
) -> None:
    """List the sources a directory knows: model, rank, status, load, readers, topology, age."""
    console = Console()
    with asking(server) as client:
        if as_json:
            while True:
                rows = [asdict(row) for row in fetch(client, model)]
                typer.echo(json.dumps({"directory": client.address, "sources": rows}, indent=None if watch else 2))
                if not watch:
                    return
                time.sleep(2)
        if not watch:
            console.print(_table(fetch(client, model), client.address))
            return
        with Live(_table(fetch(client, model), client.address), console=console) as live:
            while True:
                time.sleep(2)
                live.update(_table(fetch(client, model), client.address))


def _row(ref: Any, status: str, listing: Listing) -> SourceRow:
    now = listing.server_time_ms
    return SourceRow(
        model=ref.model_name,
        rank=ref.worker_rank,
        status=status,
        source_load=round(ref.source_load, 4) if ref.HasField("source_load") else None,
        topology=dict(ref.topology),
        age_s=None if now is None else round(max(0, now - ref.updated_at) / 1000, 1),
        readers=ref.reads_in_flight if ref.HasField("reads_in_flight") else None,
        accelerator=ref.accelerator,
        worker_id=ref.worker_id,
        mx_source_id=ref.mx_source_id,
    )


def _table(rows: list[SourceRow], address: str) -> Table:
    table = Table(title=f"{len(rows)} sources in the directory at {address}", title_justify="left")
    for heading in ("model", "rank", "status", "load", "readers", "topology", "age", "worker", "source id"):
        table.add_column(heading, overflow="fold")
    colours = {"READY": "green", "STALE": "red"}
    for row in rows:
        table.add_row(
            row.model,
            str(row.rank),
            f"[{colours.get(row.status, 'yellow')}]{row.status}",
            "unknown" if row.source_load is None else f"{row.source_load:.2f}",
            "" if row.readers is None else str(row.readers),
            " ".join(f"{level}={value}" for level, value in row.topology.items()),
            "" if row.age_s is None else f"{row.age_s:.0f} s",
            row.worker_id[:12],
            row.mx_source_id,
        )
    return table
