"""`mx top`: a fleet at work, refreshed every second: who reads what from whom, how far, how fast; versions; sources.

Invariant: it only looks. A directory that goes away keeps its last frame in view, and is found again.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer
from rich.console import RenderableType

from mx_common.cli import _top_frame
from mx_common.cli._ask import SERVER, asking, patience
from mx_common.cli._output import make_console, print_json
from mx_common.cli._top_frame import Snapshot, Traffic, frame, of_source, of_version
from mx_common.cli._watch import MAX_INTERVAL, View, print_frame, watch
from mx_common.cli.sources import fetch
from mx_common.directory.activity_client import ActivityClient
from mx_common.directory.client import DirectoryClient
from mx_common.directory.refit_client import RefitClient
from mx_common.errors import DirectoryRefused

__all__ = ["command"]


def command(
    model: str = typer.Option(None, "--model", help="Only sources, loads, refits and versions of this model."),
    server: str = SERVER,
    interval: float = typer.Option(1.0, "--interval", min=0.1, max=MAX_INTERVAL, help="Seconds between two frames."),
    once: bool = typer.Option(False, "--once", help="Print one frame and end."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON; without --once, one document a line."),
) -> None:
    """Watch a fleet at work: loads and refits with their progress, versions of trained weights, sources with load and readers.

    \b
    Examples:
      mx top
      mx top --model org/model
      mx top --once
      mx top --server 10.0.0.5:8001 --json | jq '.activities[] | [.worker_id, .bytes_done, .bytes_total]'

    \b
    reader    a replica that loads, or an engine that takes over a version; it reports once a second, what is shorter is not seen
    from      the source, or the first rank of the trainer, and how many more
    left      until all bytes have arrived, at the rate of now
    readers   of a source: the loads that read from it; of a version: its open leases
    heard     since the source's last heartbeat

    Columns that do not fit are left out, rows too, with their number; --json has all. Ctrl-C ends it.
    Exit 1 when the directory cannot be asked (with --once), 130 when it was interrupted.
    """
    console = make_console()
    with (
        asking(server) as client,
        RefitClient(client.address, timeout=patience()) as refits,
        ActivityClient(client.address, timeout=patience()) as activities,
    ):
        view = View(client, server, lambda: _fetch(client, refits, activities, model), Snapshot())

        def what(snapshot: Snapshot) -> str:
            return _top_frame.what(snapshot, model)

        def draw(snapshot: Snapshot, room: int | None = None) -> RenderableType | None:
            return frame(snapshot, console.width, room, bars=console.is_terminal)

        if not once:
            watch(view, console, interval, what=what, draw=draw, document=_document, as_json=as_json)
        view.ask()
        if as_json:
            print_json(view.document(**_document(view.answer)))
        else:
            print_frame(console, view.headline(what(view.answer)), draw(view.answer))


def _fetch(client: DirectoryClient, refits: RefitClient, activities: ActivityClient, model: str | None) -> Snapshot:
    sources, running = fetch(client, model), activities.activities(model)
    try:
        versions = tuple(refits.versions(model or ""))
    except DirectoryRefused:  # a ModelExpress server, which has no call for that
        versions = None
    return Snapshot(tuple(sources), None if running is None else tuple(running), versions)


def _document(snapshot: Snapshot) -> dict[str, Any]:
    """Every figure of a frame; `reading` is None where the directory does not tell who reads."""
    activities, versions = snapshot.activities, snapshot.versions
    return {
        "sources": [{**asdict(row), "reading": _reading(of_source(snapshot, row))} for row in snapshot.sources],
        "activities": None if activities is None else [asdict(one) for one in activities],
        "versions": None
        if versions is None
        else [{**asdict(row), "state": row.state.name, "reading": _reading(of_version(snapshot, row))} for row in versions],
    }


def _reading(traffic: Traffic | None) -> dict[str, Any] | None:
    return None if traffic is None else asdict(traffic)
