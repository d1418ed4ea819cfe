"""What `mx top` draws: a function of what a directory answered, and of the room there is.

    console.print(frame(snapshot, width=120, room=40, bars=True))

Invariant: within `room` lines every part shows its most telling rows, and says how many it leaves out. Rates are sums of what those who
read report: a source's readers and rate come from the loads that name it, a version's rate from the refits to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from mx_common.cli._columns import Column, fitted
from mx_common.cli._output import cell, span
from mx_common.cli.sources import SourceRow, place, status_cell
from mx_common.directory.activities import Activity
from mx_common.directory.refit_client import VersionInfo

__all__ = ["Snapshot", "Traffic", "frame", "of_source", "of_version", "shares", "what"]

_SHORT_ID = 8
_BAR = 12
_LONGEST = 1000 * 86400.0  # seconds
_FRAMING = 2  # lines above the rows of a part: one empty, one of headings
_STATE_COLOURS = {"READY": "green", "STAGING": "yellow", "RELEASING": "dim"}


@dataclass(frozen=True)
class Snapshot:
    """One answer of a directory. `activities` and `versions` are None where it does not tell them, as a ModelExpress server."""

    sources: tuple[SourceRow, ...] = ()
    activities: tuple[Activity, ...] | None = ()
    versions: tuple[VersionInfo, ...] | None = ()

    @functools.cached_property
    def of_worker(self) -> Mapping[str, list[Activity]]:
        """Loads by the worker that they read from."""
        return _grouped((source, one) for one in self.activities or () if one.is_load for source in one.sources)

    @functools.cached_property
    def of_version(self) -> Mapping[str, list[Activity]]:
        """Refits by the version that they go to."""
        return _grouped((one.version_id, one) for one in self.activities or ())


def _grouped(pairs: Iterable[tuple[str, Activity]]) -> dict[str, list[Activity]]:
    found: dict[str, list[Activity]] = {}
    for key, one in pairs:
        found.setdefault(key, []).append(one)
    return found


@dataclass(frozen=True)
class Traffic:
    """Who reads now: how many, and Gbit/s together."""

    readers: int
    gbps: float

    @classmethod
    def of(cls, activities: Iterable[Activity]) -> Traffic:
        """All of them together."""
        rates = [activity.gbps for activity in activities]
        return cls(len(rates), sum(rates))


def of_source(snapshot: Snapshot, source: SourceRow) -> Traffic | None:
    """The loads that read from it; None where nobody tells."""
    if snapshot.activities is None:
        return None
    return Traffic.of(snapshot.of_worker.get(source.worker_id, ()))


def of_version(snapshot: Snapshot, version: VersionInfo) -> Traffic | None:
    """The refits to it; None where nobody tells."""
    if snapshot.activities is None:
        return None
    return Traffic.of(snapshot.of_version.get(version.uid, ()))


def what(snapshot: Snapshot, model: str | None = None) -> str:
    """The snapshot in a few words."""
    parts = [_counted(len(snapshot.sources), "source")]
    if snapshot.activities is not None:
        loads = sum(one.is_load for one in snapshot.activities)
        parts += [_counted(loads, "load"), _counted(len(snapshot.activities) - loads, "refit")]
        parts.append(f"{_gbps(Traffic.of(snapshot.activities).gbps)} Gbit/s")
    return ", ".join(parts) + (f" of {model}" if model else "")


def frame(snapshot: Snapshot, width: int, room: int | None = None, *, bars: bool = True) -> RenderableType | None:
    """Loads and refits, versions, sources, `width` characters wide and at most `room` lines high; the last are left out where there is no
    room for a line of each. `bars`: progress is drawn too. None when there is nothing to be shown."""
    drawn: list[RenderableType] = []
    if snapshot.activities is None:
        drawn.append(cell("who reads, and how far, is not known: this directory is a ModelExpress server", "yellow"))
    parts = [part for part in _parts(snapshot, bars) if part.rows]
    while room is not None and parts and room - len(drawn) < (_FRAMING + 1) * len(parts):
        parts.pop()
    left = None if room is None else room - len(drawn) - _FRAMING * len(parts)
    for part, share in zip(parts, shares([len(part.rows) for part in parts], left), strict=True):
        drawn += [Text(), fitted(part.columns(part.rows[:share]), width)]
        if share < len(part.rows):
            drawn.append(cell(f"and {len(part.rows) - share} more {part.words}", "dim"))
    return Group(*drawn) if drawn else None


def shares(needs: Sequence[int], room: int | None) -> list[int]:
    """How many rows each part shows, of the lines that they have together. None needs more than its rows; one that is cut takes a line to
    say so. What a part does not need goes to the others."""
    if room is None:
        return list(needs)
    rows, left = [0] * len(needs), max(room, 0)
    for waiting, at in enumerate(sorted(range(len(needs)), key=lambda at: needs[at])):
        lines = min(needs[at], left // (len(needs) - waiting))
        rows[at] = lines if lines == needs[at] else max(lines - 1, 0)
        left -= lines
    return rows


@dataclass(frozen=True)
class _Part:
    """`rows`: the most telling ones first; `words`: what those that are left out are."""

    words: str
    rows: Sequence[Any]
    columns: Callable[[Sequence[Any]], list[Column]]


def _parts(snapshot: Snapshot, bars: bool) -> list[_Part]:
    # what goes on for long is what somebody looks for, and its place does not change from frame to frame
    activities = sorted(snapshot.activities or (), key=lambda one: (-one.seconds, one.activity_id))
    versions = sorted(snapshot.versions or (), key=lambda version: (-version.order, version.uid))
    busy = {id(source): of_source(snapshot, source) for source in snapshot.sources}

    def order(source: SourceRow) -> tuple[Any, ...]:
        readers, load = _readers(source, busy[id(source)]) or 0, source.source_load
        return source.status != "READY" or source.ended, -readers, -1.0 if load is None else -load, source.model, source.rank

    return [
        _Part("loads or refits, begun later", activities, lambda rows: _of_activities(rows, bars)),
        _Part("versions, made earlier", versions, lambda rows: _of_versions(rows, snapshot)),
        _Part("sources, less busy", sorted(snapshot.sources, key=order), lambda rows: _of_sources(rows, busy)),
    ]


def _of_activities(rows: Sequence[Activity], bars: bool) -> list[Column]:
    columns = [
        Column("reader", [cell(one.worker_id[:_SHORT_ID]) for one in rows]),
        Column("rank", [cell(f"{one.rank}/{one.world}") for one in rows], spare=8),
        Column("host", [cell(one.host) for one in rows], least=8, spare=10),
        Column("model", [cell(one.model_name) for one in rows], least=16, spare=6),
        Column("what", [cell(_purpose(one)) for one in rows], spare=3),
        Column("from", [cell(_origin(one)) for one in rows], least=8, spare=5),
        Column("stage", [cell(one.stage) for one in rows], spare=4),
    ]
    if bars:
        columns.append(Column("progress", [_bar(one) for one in rows], spare=7, width=_BAR))
    return [
        *columns,
        Column("done", [cell(_share(one)) for one in rows], spare=1, right=True),
        Column("of", [cell(_size(one.bytes_total)) for one in rows], spare=9, right=True),
        Column("Gbit/s", [cell(_gbps(one.gbps)) for one in rows], spare=2, right=True),
        Column("left", [cell(_left(one)) for one in rows], spare=4, right=True),
    ]


def _of_versions(rows: Sequence[VersionInfo], snapshot: Snapshot) -> list[Column]:
    states = [cell(row.state.name, _STATE_COLOURS.get(row.state.name, "")) for row in rows]
    columns = [
        Column("version", [cell(row.number if row.number >= 0 else row.uid[:_SHORT_ID]) for row in rows], right=True),
        Column("of model", [cell(row.model_name) for row in rows], least=16, spare=4),
        Column("run", [cell(row.run) for row in rows], least=8, spare=7),
        Column("state", states, spare=1),
        Column("shards", [cell(f"{len(row.slots) - len(row.missing)}/{len(row.slots)}") for row in rows], spare=5, right=True),
        Column("readers", [cell(row.open_leases) for row in rows], spare=2, right=True),
        Column("Gbit/s", [cell(_rate(of_version(snapshot, row))) for row in rows], spare=3, right=True),
        Column("age", [cell(span(row.age_s)) for row in rows], spare=6, right=True),
    ]
    if any(row.missing for row in rows):
        columns.append(Column("waits for", [cell(_first(row.missing)) for row in rows], least=8, spare=6))
    return columns


def _of_sources(rows: Sequence[SourceRow], busy: dict[int, Traffic | None]) -> list[Column]:
    loads = ["unknown" if row.source_load is None else f"{row.source_load:.2f}" for row in rows]
    return [
        Column("source", [cell(row.worker_id[:_SHORT_ID]) for row in rows]),
        Column("rank", [cell(row.rank) for row in rows], spare=8, right=True),
        Column("model", [cell(row.model) for row in rows], least=16, spare=5),
        Column("status", [status_cell(row) for row in rows], spare=1),
        Column("load", [cell(load) for load in loads], spare=2, right=True),
        Column("readers", [cell(_readers(row, busy[id(row)])) for row in rows], spare=3, right=True),
        Column("Gbit/s", [cell(_rate(busy[id(row)])) for row in rows], spare=4, right=True),
        Column("heard", [cell(span(row.age_s)) for row in rows], spare=6, right=True),
        Column("place", [cell(place(row.topology)) for row in rows], least=14, spare=7),
    ]


def _readers(source: SourceRow, busy: Traffic | None) -> int | None:
    """Those who report now; with a directory that does not know them, what the source's last heartbeat said."""
    return source.readers if busy is None else busy.readers


def _purpose(one: Activity) -> str:
    if one.is_load:
        return "load"
    return "refit" if one.version is None else f"refit to {one.version}"


def _origin(one: Activity) -> str:
    more = f" +{len(one.sources) - 1}" if len(one.sources) > 1 else ""
    return one.sources[0][:_SHORT_ID] + more if one.sources else ""


def _bar(one: Activity) -> RenderableType:
    return ProgressBar(
        total=max(one.bytes_total, 1), completed=one.bytes_done, width=_BAR, complete_style="cyan", finished_style="green"
    )


def _share(one: Activity) -> str:
    return f"{min(100 * one.bytes_done // one.bytes_total, 100)} %" if one.bytes_total else ""


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB" if count else ""


def _left(one: Activity) -> str:
    """At the rate that it has now; nothing at a rate at which nobody waits."""
    bits = 8 * (one.bytes_total - one.bytes_done)
    seconds = 1e-9 * bits / one.gbps if one.gbps > 0 else 0.0
    return span(seconds) if 0 < seconds < _LONGEST else ""


def _gbps(rate: float) -> str:
    return f"{rate:.2f}" if 0 < rate < 1 else f"{rate:.1f}"


def _rate(busy: Traffic | None) -> str:
    return "" if busy is None or not busy.readers else _gbps(busy.gbps)


def _first(names: Sequence[str]) -> str:
    return (names[0] if names else "") + (f" +{len(names) - 1}" if len(names) > 1 else "")


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
