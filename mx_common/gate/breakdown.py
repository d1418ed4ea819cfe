"""What records say beside a rate: who sent how many bytes to whom, and where the seconds went. Summed while records are read.

    evidence.breakdown.links[LinkKey("reshard", "org/model", "rank1", 3, "node7", "ucx:tcp")].wire_bytes
    evidence.breakdown.refits["reshard", "org/model", 7].seconds        # of the rank that took longest

Invariant: memory grows with pairs of workers and with versions, never with transfers; of loads the slowest are kept.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from mx_common.floor import gbps
from mx_common.source_load import as_float

if TYPE_CHECKING:
    from mx_common.gate.evidence import Transfer

__all__ = ["Breakdown", "Link", "LinkKey", "Stages"]

LOADS_KEPT = 64
MOST = 1e18
"""Bytes, seconds and Gbit/s above it mean nothing, and would spoil sums."""
_STAGES = 16
_TRAITS = ("engine", "framework", "transport", "policy")
_TRAIT_VALUES = 8


class LinkKey(NamedTuple):
    """One source and one reader. `rank` and `host` are the reader's."""

    path: str
    model: str
    source: str
    rank: int | None
    host: str
    transport: str


@dataclass(slots=True)
class Link:
    """What a source sent to a reader. `timed_bytes` in `seconds`: the part whose rate means something. `lowest`: its slowest transfer,
    Gbit/s, and the file and line of it."""

    transfers: int = 0
    wire_bytes: float = 0.0
    timed_bytes: float = 0.0
    seconds: float = 0.0
    lowest: float | None = None
    where: str = ""

    @property
    def gbps(self) -> float | None:
        """The rate over all its timed transfers."""
        return gbps(self.timed_bytes, self.seconds)


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds by stage of one rank, in the order in which they were written."""

    step: int | None
    rank: int | None
    host: str
    seconds: tuple[tuple[str, float], ...]

    @property
    def total(self) -> float:
        """All stages together."""
        return sum(taken for _, taken in self.seconds)


@dataclass
class Breakdown:
    """`refits`: by path, model and step, the stages of the rank that took longest. `loads`: by path and model, those of the slowest loads.
    `traits`: by path and model, the engines, trainers, transports and policies that were named."""

    links: dict[LinkKey, Link] = field(default_factory=lambda: defaultdict(Link))
    refits: dict[tuple[str, str, int | None], Stages] = field(default_factory=dict)
    traits: dict[tuple[str, str], dict[str, set[str]]] = field(default_factory=dict)
    _loads: dict[tuple[str, str], list[tuple[float, int, Stages]]] = field(default_factory=dict, repr=False)
    _counter: Iterator[int] = field(default_factory=itertools.count, repr=False)

    @property
    def loads(self) -> dict[tuple[str, str], list[Stages]]:
        """Slowest first, at most LOADS_KEPT of each."""
        return {key: [stages for _, _, stages in sorted(heap, reverse=True)] for key, heap in self._loads.items()}

    def add(self, row: Transfer, record: Mapping[str, Any]) -> None:
        """Count a transfer. One that is impossible moved nothing."""
        traits = self.traits.setdefault((row.path, row.model), {name: set() for name in _TRAITS})
        for name, values in traits.items():
            value = record.get(name)
            if value and isinstance(value, str) and len(values) < _TRAIT_VALUES:
                values.add(value)
        if row.verdict == "impossible":
            return
        said, peers, comparable = record.get("transport"), record.get("peers"), row.comparable
        transport = said if isinstance(said, str) else ""
        for peer in peers if isinstance(peers, list) else ():
            if isinstance(peer, dict) and isinstance(peer.get("source"), str):
                key = LinkKey(row.path, row.model, peer["source"], row.rank, row.host, transport)
                _count(self.links[key], row, comparable, _figure(peer.get("wire_bytes")), _figure(peer.get("wire_s")))
        self.took(row.path, row.model, row.step, row.rank, row.host, record.get("stages_s"))

    def took(self, path: str, model: str, step: int | None, rank: int | None, host: str, stages: object) -> None:
        """Count the seconds of one rank's stages; what is said after the transfer includes what was said with it."""
        if not isinstance(stages, dict):
            return
        figures = [(name, taken) for name, value in stages.items() if (taken := _figure(value)) is not None]
        if not figures:
            return
        found = Stages(step, rank, host, tuple(figures[:_STAGES]))
        if path == "load":  # each is its own: they have no step in common
            heap = self._loads.setdefault((path, model), [])
            heapq.heappush(heap, (found.total, next(self._counter), found))
            if len(heap) > LOADS_KEPT:
                heapq.heappop(heap)
            return
        known = self.refits.get((path, model, step))
        if known is None or found.total > known.total:
            self.refits[path, model, step] = found


def _count(link: Link, row: Transfer, comparable: bool, moved: float | None, seconds: float | None) -> None:
    link.transfers += 1
    link.wire_bytes += moved or 0.0
    rate = gbps(moved, seconds) if comparable else None
    if rate is None or rate > MOST:
        return
    link.timed_bytes += moved or 0.0
    link.seconds += seconds or 0.0
    if link.lowest is None or rate < link.lowest:
        link.lowest, link.where = rate, row.where


def _figure(value: object) -> float | None:
    figure = math.nan if isinstance(value, bool) else as_float(value)
    return figure if 0 <= figure <= MOST else None
