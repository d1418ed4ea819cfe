"""Every rank's rate over the steps of a run, held against floor and ceiling, in a bounded number of points.

    rates_of(rows, names).lines         # each rank, or the worst of many
    rates_of(rows, names).band          # where all ranks lie, when there are too many to draw

Steps that are too many to draw share a point, in which the lowest rate of a rank counts, so that nothing bad is averaged away.
Invariant: a function of its arguments; at most RANKS_DRAWN + WORST lines, POINTS points and MARKS marks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mx_common.gate import Transfer

__all__ = ["MARKS", "POINTS", "RANKS_DRAWN", "WORST", "Band", "Line", "Mark", "Member", "Rates", "member_of", "rates_of"]

RANKS_DRAWN, WORST, POINTS, MARKS = 12, 8, 300, 200
_PERCENTILES = (0, 5, 50, 95)

Member = tuple[int | None, str]
"""Rank and host, as the gate tells ranks apart."""


@dataclass(frozen=True)
class Line:
    """One rank's rate at each point, Gbit/s; None where it has none."""

    name: str
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Band:
    """Rates of all ranks at each point: lowest, 5th percentile, median, 95th percentile."""

    lowest: tuple[float, ...]
    low: tuple[float, ...]
    middle: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Mark:
    """A slow or an impossible transfer."""

    step: int
    gbps: float
    verdict: str
    name: str
    where: str


@dataclass(frozen=True)
class Rates:
    """`steps`: the first step of each point. `together`: steps that share a point. `floor`, `ceiling`: the highest floor and the lowest
    ceiling in force at each point, None without one. `notes`: what was left out, in words."""

    steps: tuple[int, ...]
    together: int
    lines: tuple[Line, ...]
    band: Band | None
    floor: tuple[float | None, ...]
    ceiling: tuple[float | None, ...]
    marks: tuple[Mark, ...]
    notes: tuple[str, ...]


def member_of(row: Transfer) -> Member:
    """Who read."""
    return row.rank, row.host


def rates_of(rows: Sequence[Transfer], names: Mapping[Member, str]) -> Rates | None:
    """`names`: the members in the order of the report, worst first. None when there are not two steps to draw a line between."""
    drawn = [row for row in rows if row.gbps is not None and row.step is not None and (row.comparable or _impossible(row))]
    steps = sorted({row.step for row in drawn if row.step is not None})
    if len(steps) < 2:
        return None
    together = -(-len(steps) // POINTS)
    points = tuple(steps[::together])
    place = {step: number // together for number, step in enumerate(steps)}
    at = np.array([place[row.step] for row in drawn if row.step is not None], dtype=np.int64)
    rate = np.array([row.gbps for row in drawn], dtype=np.float64)
    shown = list(names) if len(names) <= RANKS_DRAWN else list(names)[:WORST]
    notes = []
    if together > 1:
        notes.append(f"{len(steps):,} steps; {together} of them share a point, at which a rank's lowest rate counts.")
    if len(shown) < len(names):
        notes.append(f"{len(names):,} ranks; the worst {len(shown)} are lines, the band is of all.")
    marked = sorted((row for row in drawn if row.verdict in ("slow", "impossible")), key=lambda row: row.gbps or 0.0)
    if len(marked) > MARKS:
        # an impossible one is rare and ends a run: it is never the one that is left out
        marked = sorted(marked, key=lambda row: not _impossible(row))[:MARKS]
        notes.append(f"Only the worst {MARKS} transfers out of bounds are marked.")
    floor, ceiling = _bounds(drawn, at, len(points))
    if len({row.floor for row in drawn}) > 1:
        notes.append("Floors differ; the line is the highest in force at each point.")
    return Rates(
        points,
        together,
        _lines(drawn, at, {member: names[member] for member in shown}, len(points)),
        _band(rate, at, len(points)) if len(shown) < len(names) else None,
        floor,
        ceiling,
        tuple(Mark(row.step or 0, row.gbps or 0.0, row.verdict, names.get(member_of(row), ""), row.where) for row in marked),
        tuple(notes),
    )


def _impossible(row: Transfer) -> bool:
    return row.verdict == "impossible"


def _lines(rows: Sequence[Transfer], at: npt.NDArray[np.int64], names: Mapping[Member, str], points: int) -> tuple[Line, ...]:
    lowest: dict[Member, list[float | None]] = {member: [None] * points for member in names}
    for row, point in zip(rows, at.tolist(), strict=True):
        values = lowest.get(member_of(row))
        if values is not None and row.gbps is not None:
            known = values[point]
            values[point] = row.gbps if known is None else min(known, row.gbps)
    return tuple(Line(names[member], tuple(values)) for member, values in lowest.items())


def _band(rate: npt.NDArray[np.float64], at: npt.NDArray[np.int64], points: int) -> Band:
    order = np.argsort(at, kind="stable")
    groups = np.split(rate[order], np.searchsorted(at[order], np.arange(1, points)))
    rows = [np.percentile(group, _PERCENTILES).round(2).tolist() for group in groups]
    return Band(*(tuple(column) for column in zip(*rows, strict=True)))


def _bounds(
    rows: Sequence[Transfer], at: npt.NDArray[np.int64], points: int
) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
    floors: dict[int, float] = defaultdict(float)
    ceilings: dict[int, float] = {}
    for row, point in zip(rows, at.tolist(), strict=True):
        floors[point] = max(floors[point], row.floor or 0.0)
        if row.ceiling:
            ceilings[point] = min(ceilings.get(point, row.ceiling), row.ceiling)
    return tuple(floors[n] or None for n in range(points)), tuple(ceilings.get(n) for n in range(points))
