"""`mx sources`: what the directory knows, as a table.

Invariant: what is shown is one answer of one directory; while it does not answer, `--watch` keeps its last one and says how old it is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mx_common.cli._ask import SERVER, asking
from mx_common.cli._output import cell, make_console, make_table, print_json, span
from mx_common.cli._watch import MAX_INTERVAL, View, print_frame, watch
from mx_common.directory.client import DirectoryClient, Listing
from mx_common.load import lives
from mx_common.topology import levels
from mx_common.wire import p2p

__all__ = ["SourceRow", "command", "fetch", "place", "status_cell"]

STATUS_WORDS: dict[Any, str] = {
    p2p.SOURCE_STATUS_UNKNOWN: "UNKNOWN",
    p2p.SOURCE_STATUS_INITIALIZING: "INITIALIZING",
    p2p.SOURCE_STATUS_READY: "READY",
    p2p.SOURCE_STATUS_STALE: "STALE",
}
_COLOURS = {"READY": "green", "STALE": "red"}
_NARROW = ("model", "rank", "status", "load", "topology", "age", "worker")
_WIDE = (*_NARROW, "readers", "accelerator", "source id")
_SHORT_ID = 12


@dataclass(frozen=True)
class SourceRow:
    """One source for display; `age_s` since its last heartbeat by the directory's clock, None when that does not tell its time;
    `ended`: it was a process of this host and is no more, whatever the directory still says."""

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
    ended: bool = False


def fetch(client: DirectoryClient, model: str | None = None) -> list[SourceRow]:
    """Every source, of one model or all, by model, identity, rank and worker. Raises DirectoryError."""
    listing, gone = client.list_sources(model_name=model), lives.gone()
    if all(ref.HasField("status") for ref in listing.instances):
        rows = [_row(ref, STATUS_WORDS.get(ref.status, str(ref.status)), listing, gone) for ref in listing.instances]
    else:  # a server that does not state the status answers for one status at a time
        rows = []
        for status, word in STATUS_WORDS.items():
            part = client.list_sources(status=status, model_name=model)
            rows += [_row(ref, word, part, gone) for ref in part.instances]
    return sorted(rows, key=lambda row: (row.model, row.mx_source_id, row.rank, row.worker_id))


def command(
    model: str = typer.Option(None, "--model", help="Only sources of this model."),
    server: str = SERVER,
    watching: bool = typer.Option(
        False, "--watch", "-w", help="Refresh until interrupted; waits for a directory that is away."
    ),
    interval: float = typer.Option(
        2.0, "--interval", min=0.1, max=MAX_INTERVAL, help="Seconds between two refreshes of --watch."
    ),
    wide: bool = typer.Option(False, "--wide", help="Also readers, accelerator, whole worker ids and source ids."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON; with --watch, one document a line."),
) -> None:
    """List the sources a directory knows: model, rank, status, load, topology, age of the last heartbeat, worker.

    \b
    Examples:
      mx sources
      mx sources --watch
      mx sources --model org/model --wide
      mx sources --server 10.0.0.5:8001 --json

    \b
    READY         can be read from
    INITIALIZING  registered, its engine cannot serve yet
    STALE         silent for MX_STALE_SECONDS, or has said that it ends
    (ended)       a process of this host that is no more; replicas of this host leave it out
    load unknown  it published no reading, which policies take as 0.5

    Exit 1 when the directory cannot be asked (without --watch).
    """
    console = make_console(wide=wide)
    with asking(server) as client:
        view: View[list[SourceRow]] = View(client, server, lambda: fetch(client, model), [])

        def what(rows: list[SourceRow]) -> str:
            return _what(rows, model)

        def draw(rows: list[SourceRow], room: int | None = None) -> RenderableType | None:
            return _table(console, rows, wide) if rows else None

        if watching:
            watch(view, console, interval, what=what, draw=draw, document=_document, as_json=as_json)
        view.ask()
        if as_json:
            print_json(view.document(**_document(view.answer)))
        else:
            print_frame(console, view.headline(what(view.answer)), draw(view.answer))


def _what(rows: list[SourceRow], model: str | None) -> str:
    of = f" of {model}" if model else ""
    return f"{len(rows)} source{'' if len(rows) == 1 else 's'}{of}"


def _document(rows: list[SourceRow]) -> dict[str, Any]:
    return {"sources": [asdict(row) for row in rows]}


def _row(ref: Any, status: str, listing: Listing, gone: frozenset[str]) -> SourceRow:
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
        ended=ref.worker_id in gone,
    )


def place(topology: dict[str, str]) -> str:
    """Levels from broad to narrow; those that are not configured here last."""
    order = {level: index for index, level in enumerate(levels())}
    return " ".join(
        f"{level}={topology[level]}" for level in sorted(topology, key=lambda name: (order.get(name, len(order)), name))
    )


def status_cell(row: SourceRow) -> Text:
    """Its status, and whether its process has ended."""
    return cell(
        f"{row.status} (ended)" if row.ended else row.status, "red" if row.ended else _COLOURS.get(row.status, "yellow")
    )


def _table(console: Console, rows: list[SourceRow], wide: bool) -> Table:
    table = make_table(console, *(_WIDE if wide else _NARROW), whole=("rank", "status", "load", "age"))
    for row in rows:
        cells = [
            cell(row.model),
            cell(row.rank),
            status_cell(row),
            cell("unknown" if row.source_load is None else f"{row.source_load:.2f}"),
            cell(place(row.topology)),
            cell(span(row.age_s)),
            cell(row.worker_id if wide else row.worker_id[:_SHORT_ID]),
        ]
        if wide:
            cells += [cell(row.readers), cell(row.accelerator), cell(row.mx_source_id)]
        table.add_row(*cells)
    return table
