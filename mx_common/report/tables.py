"""What a report shows, as values: the verdict in words, and for each path and model its ranks, rates, stages, sources and links.

    report = tabulate(evidence, outcome)
    report.headline, report.sentences, report.runs[0].links[0].gbps

Invariant: a function of its arguments whose result has a bounded size, however many transfers there were; what is left out is counted.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mx_common.gate import Evidence, Finding, Outcome, Transfer
from mx_common.gate.breakdown import Breakdown, Link, LinkKey, Stages
from mx_common.gate.outputs import BROKEN, RULES, WORDS
from mx_common.report.rates import Member, Rates, member_of, rates_of

__all__ = ["FINDINGS", "LINKS", "RANKS", "RUNS", "SOURCES", "STAGE_BARS", "TRANSFERS"]
__all__ += ["LinkRow", "RankRow", "Report", "Run", "SourceRow", "StageBars", "TransferRow", "tabulate"]

RUNS, FINDINGS, RANKS, TRANSFERS, STAGE_BARS, SOURCES, LINKS = 6, 100, 1000, 24, 60, 20, 20

_Key = tuple[str, str]  # path and model
STAGE_ORDER = ("wait", "plan", "connect", "wire", "verify", "copy", "check", "land", "install")


@dataclass(frozen=True)
class RankRow:
    """One rank. Rates are Gbit/s, None when nothing was measured; `where`: file and line of its lowest."""

    name: str
    rank: int | None
    host: str
    transfers: int
    out_of_bounds: int
    lowest: float | None
    median: float | None
    lowest_step: int | None
    where: str


@dataclass(frozen=True)
class TransferRow:
    """One transfer of a run that has no steps to compare."""

    name: str
    gbps: float
    verdict: str
    floor: float
    ceiling: float
    where: str


@dataclass(frozen=True)
class StageBars:
    """Seconds by stage; `seconds[n][i]` is stage `names[i]` of bar n. A bar is a refit's slowest rank, or a load."""

    names: tuple[str, ...]
    bars: tuple[str, ...]
    ranks: tuple[str, ...]
    seconds: tuple[tuple[float, ...], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class SourceRow:
    """What one source sent."""

    source: str
    wire_bytes: float
    share: float
    readers: int
    transfers: int


@dataclass(frozen=True)
class LinkRow:
    """One source and one reader; rates are Gbit/s."""

    source: str
    reader: str
    transport: str
    gbps: float
    lowest: float
    wire_bytes: float
    transfers: int
    where: str


@dataclass(frozen=True)
class Run:
    """One path and model. `rates` when there are steps, `transfers` (slowest first) when there are not."""

    path: str
    model: str
    traits: tuple[tuple[str, str], ...]
    count: int
    steps: int
    lowest: float | None
    median: float | None
    floor: str
    rates: Rates | None
    transfers: tuple[TransferRow, ...]
    ranks: tuple[RankRow, ...]
    ranks_in_all: int
    stages: StageBars | None
    sources: tuple[SourceRow, ...]
    sources_in_all: int
    links: tuple[LinkRow, ...]
    links_in_all: int
    unmeasured: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Report:
    """`verdict`: pass, regression or no evidence. `sentences` say why, worst first."""

    verdict: str
    headline: str
    sentences: tuple[str, ...]
    findings: tuple[Finding, ...]
    findings_in_all: int
    runs: tuple[Run, ...]
    runs_in_all: int


def tabulate(evidence: Evidence, outcome: Outcome) -> Report:
    """Everything that the page shows. Runs with most transfers out of bounds come first."""
    grouped: dict[_Key, list[Transfer]] = defaultdict(list)
    for row in evidence.transfers:
        grouped[row.path, row.model].append(row)
    order = sorted(grouped, key=lambda key: (-sum(map(_out_of_bounds, grouped[key])), -len(grouped[key]), key))
    links: dict[_Key, list[tuple[LinkKey, Link]]] = defaultdict(list)
    for key, link in evidence.breakdown.links.items():
        links[key.path, key.model].append((key, link))
    return Report(
        WORDS[outcome.code],
        _headline(outcome, len(evidence.transfers), len(grouped)),
        _sentences(outcome),
        outcome.findings[:FINDINGS],
        len(outcome.findings),
        tuple(_run(key, grouped[key], links[key], evidence.breakdown) for key in order[:RUNS]),
        len(grouped),
    )


def _headline(outcome: Outcome, transfers: int, runs: int) -> str:
    counted = ", ".join(f"{count:,} {verdict}" for verdict, count in sorted(outcome.counts.items())) or "none"
    dropped = f"; {outcome.dropped:,} of them are warm-up" if outcome.dropped else ""
    over = f" on {runs} paths and models" if runs > 1 else ""
    return f"{_many(transfers, 'transfer')}{over}: {counted}{dropped}."


def _sentences(outcome: Outcome) -> tuple[str, ...]:
    """One sentence a broken rule, with its worst case; why it is green when none is."""
    if not outcome.findings:
        allowed = " Slow transfers are within the share that was allowed." if outcome.counts.get("slow") else ""
        unmeasured = " Transfers too small to measure were allowed." if outcome.counts.get("unmeasured") else ""
        return (
            "Transfers were held against a floor, no rank lags behind its like, and the run does not slow down."
            + allowed
            + unmeasured,
        )
    found: dict[str, list[Finding]] = defaultdict(list)
    for finding in outcome.findings:
        found[finding.rule].append(finding)
    return tuple(f"{BROKEN[rule].format(n=len(found[rule]))} {_worst(found[rule])}." for rule in RULES if rule in found)


def _worst(found: Sequence[Finding]) -> str:
    text = f"{found[0].text} ({found[0].where})" if found[0].where else found[0].text
    return f"Worst: {text}" if len(found) > 1 else text[:1].upper() + text[1:]


def _run(key: _Key, rows: list[Transfer], links: list[tuple[LinkKey, Link]], breakdown: Breakdown) -> Run:
    path, model = key
    ranks = _ranks(rows)
    names = {(row.rank, row.host): row.name for row in ranks}
    rates = rates_of(rows, names)
    figures = [row.gbps for row in rows if row.gbps is not None and row.comparable]
    floors = sorted({row.floor for row in rows if row.floor})
    sources = _sources(links)
    slowest = _links(links, names)
    unmeasured: dict[str, int] = defaultdict(int)
    for row in rows:
        if row.verdict == "unmeasured":
            unmeasured[row.reason or "no reason given"] += 1
    return Run(
        path,
        model,
        tuple((name, ", ".join(sorted(values))) for name, values in breakdown.traits.get(key, {}).items() if values),
        len(rows),
        len({row.step for row in rows}),
        min(figures, default=None),
        statistics.median(figures) if figures else None,
        " to ".join(f"{floor:g}" for floor in dict.fromkeys((floors[0], floors[-1]))) if floors else "none",
        rates,
        () if rates else _transfers(rows, names),
        tuple(ranks[:RANKS]),
        len(ranks),
        _stages(key, breakdown, names),
        tuple(sources[:SOURCES]),
        len(sources),
        tuple(slowest[:LINKS]),
        len(slowest),
        tuple(sorted(unmeasured.items())),
    )


def _ranks(rows: Iterable[Transfer]) -> list[RankRow]:
    """Worst first: those with most transfers out of bounds, then those with the lowest median."""
    of: dict[Member, list[Transfer]] = defaultdict(list)
    for row in rows:
        of[member_of(row)].append(row)
    alone = len({rank for rank, _ in of}) == len(of)
    found = []
    for (rank, host), mine in of.items():
        timed = [row for row in mine if row.comparable]
        worst = min(timed, key=lambda row: row.gbps or 0.0, default=None)
        number = "no rank" if rank is None else f"rank {rank}"
        found.append(
            RankRow(
                number if alone or not host else f"{number} on {host}",
                rank,
                host,
                len(mine),
                sum(map(_out_of_bounds, mine)),
                worst.gbps if worst else None,
                statistics.median(row.gbps or 0.0 for row in timed) if timed else None,
                worst.step if worst else None,
                (worst or mine[0]).where,
            )
        )
    unknown = float("inf")
    return sorted(
        found,
        key=lambda row: (
            -row.out_of_bounds,
            unknown if row.median is None else row.median,
            unknown if row.rank is None else row.rank,
            row.host,
        ),
    )


def _transfers(rows: Iterable[Transfer], names: Mapping[Member, str]) -> tuple[TransferRow, ...]:
    shown = sorted(
        (row for row in rows if row.comparable or row.verdict == "impossible"),
        key=lambda row: (row.verdict != "impossible", row.gbps or 0.0),
    )
    return tuple(
        TransferRow(names[member_of(row)], row.gbps or 0.0, row.verdict, row.floor or 0.0, row.ceiling, row.where)
        for row in shown[:TRANSFERS]
    )


def _stages(key: _Key, breakdown: Breakdown, names: Mapping[Member, str]) -> StageBars | None:
    refits = sorted(
        (found for (path, model, _), found in breakdown.refits.items() if (path, model) == key),
        key=lambda one: -1 if one.step is None else one.step,
    )
    loads = breakdown.loads.get(key, [])
    shown: Sequence[Stages] = refits or loads[:STAGE_BARS]
    if not shown:
        return None
    notes = []
    if refits:
        notes.append("Each bar is the rank that took longest.")
        together = -(-len(refits) // STAGE_BARS)
        if together > 1:
            shown = [max(refits[n : n + together], key=lambda one: one.total) for n in range(0, len(refits), together)]
            notes.append(f"{len(refits):,} refits; of each {together} in a row the slowest is shown.")
    elif len(loads) > len(shown):
        notes.append(f"The slowest {len(shown)} loads.")
    named = {name for one in shown for name, _ in one.seconds}
    known = [name for name in STAGE_ORDER if name in named]
    order = (*known, *sorted(named.difference(known)))
    whole = [dict(one.seconds) for one in shown]
    ranks = tuple(names.get((one.rank, one.host)) or f"rank {one.rank}" for one in shown)
    return StageBars(
        order,
        tuple("-" if one.step is None else str(one.step) for one in shown) if refits else ranks,
        ranks,
        tuple(tuple(mine.get(name, 0.0) for name in order) for mine in whole),
        tuple(notes),
    )


def _sources(links: Iterable[tuple[LinkKey, Link]]) -> list[SourceRow]:
    """Most bytes first."""
    moved: dict[str, float] = defaultdict(float)
    transfers: dict[str, int] = defaultdict(int)
    readers: dict[str, set[Member]] = defaultdict(set)
    for key, link in links:
        moved[key.source] += link.wire_bytes
        transfers[key.source] += link.transfers
        readers[key.source].add((key.rank, key.host))
    whole = sum(moved.values())
    found = [
        SourceRow(source, sent, sent / whole if whole else 0.0, len(readers[source]), transfers[source])
        for source, sent in moved.items()
    ]
    return sorted(found, key=lambda row: (-row.wire_bytes, row.source))


def _links(links: Iterable[tuple[LinkKey, Link]], names: Mapping[Member, str]) -> list[LinkRow]:
    """Slowest first; links whose rate says nothing are left out."""
    found = [
        LinkRow(
            key.source,
            names.get((key.rank, key.host), f"rank {key.rank}"),
            key.transport,
            rate,
            link.lowest or rate,
            link.wire_bytes,
            link.transfers,
            link.where,
        )
        for key, link in links
        if (rate := link.gbps) is not None
    ]
    return sorted(found, key=lambda row: (row.gbps, row.source, row.reader))


def _out_of_bounds(row: Transfer) -> bool:
    return row.verdict in ("slow", "impossible")


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
