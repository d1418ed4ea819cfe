"""What came of a simulation, in numbers.

    Figures.of(scenario, tallies)       # a tally for each trial

Invariant: every share is over the targets it is about, of all trials together; a share of nothing is None, not 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mx_common._frozen import FrozenMap
from mx_common.simulate.scenario import Scenario

__all__ = ["NOWHERE", "Figure", "Figures", "Tally"]

NOWHERE = "none"


@dataclass
class Tally:
    """One trial: `picks` of each source; numbers of targets: by the narrowest level shared with their source (-1: none), that had a
    source outside their first one's narrowest domain and how many of them tried one, that kept their source when others left and how
    many of them moved all the same, that moved in all."""

    picks: npt.NDArray[np.int64]
    depths: dict[int, int] = field(default_factory=dict)
    could_escape: int = 0
    escaped: int = 0
    unaffected: int = 0
    unaffected_moved: int = 0
    moved: int = 0


@dataclass(frozen=True)
class Figure:
    """One number with its name in words; `share`: of 1, else a ratio to an even fleet. None: the scenario has no such thing."""

    name: str
    value: float | None
    share: bool = True


@dataclass(frozen=True)
class Figures:
    """A pick is the first choice of a target. Shares are 0 to 1, None where the scenario has no such thing.

    peak_mean, peak_p50, peak_p99: over trials, picks of the most picked source over the mean of all sources.
    busy_share: of picks, on sources at BUSY_LOAD or more.
    shared: of picks, by the narrowest level that source and target share.
    outside_share: of targets that could, those with one of their attempts outside the narrowest domain of the first.
    moved_on_leave: of targets whose source stays, those that move when others leave. moved_on_join: of all, when those come back.
    time_mean, time_p99: over targets, how long a load takes, 1 where all sources have the same number of readers.
    picks_mean, picks_low, picks_high: picks of the most picked source, of the next, ...: mean, 5th and 95th percentile of trials.
    """

    peak_mean: float
    peak_p50: float
    peak_p99: float
    busy_share: float | None
    shared: FrozenMap[str, float]
    outside_share: float | None
    moved_on_leave: float | None
    moved_on_join: float | None
    time_mean: float
    time_p99: float
    picks_mean: tuple[float, ...]
    picks_low: tuple[float, ...]
    picks_high: tuple[float, ...]

    @classmethod
    def of(cls, scenario: Scenario, tallies: Sequence[Tally]) -> Figures:
        """Figures over the trials of a scenario."""
        picks = np.array([tally.picks for tally in tallies])
        peaks = picks.max(axis=1) * scenario.sources / scenario.targets
        total = picks.sum()
        busy = scenario.busy
        # all readers of a source start together, share its bandwidth equally, and are done together: k targets that take k shares each
        sizes = np.arange(picks.max() + 1)
        takers = sizes * np.bincount(picks.ravel())
        ranked = -np.sort(-picks, axis=1)
        return cls(
            peak_mean=float(peaks.mean()),
            peak_p50=float(np.percentile(peaks, 50)),
            peak_p99=float(np.percentile(peaks, 99)),
            busy_share=float(picks[:, busy].sum() / total) if busy else None,
            shared=FrozenMap(_shared(scenario, tallies)),
            outside_share=_share(tallies, "escaped", "could_escape"),
            moved_on_leave=_share(tallies, "unaffected_moved", "unaffected") if scenario.leaving else None,
            moved_on_join=float(sum(tally.moved for tally in tallies) / total) if scenario.leaving else None,
            time_mean=float((sizes * takers).sum() / total / scenario.share),
            time_p99=_percentile(takers, 99) / scenario.share,
            picks_mean=tuple(ranked.mean(axis=0).tolist()),
            picks_low=tuple(np.percentile(ranked, 5, axis=0).tolist()),
            picks_high=tuple(np.percentile(ranked, 95, axis=0).tolist()),
        )

    def named(self) -> list[Figure]:
        """All but the picks of each source, as people read them."""
        return [
            Figure("most picked source over mean: p50", self.peak_p50, share=False),
            Figure("most picked source over mean: p99", self.peak_p99, share=False),
            Figure("time of a load: mean", self.time_mean, share=False),
            Figure("time of a load: p99", self.time_p99, share=False),
            Figure("picks on busy sources", self.busy_share),
            *(Figure(f"narrowest shared: {level}", share) for level, share in self.shared.items()),
            Figure("tried another domain", self.outside_share),
            Figure("moved by a leave", self.moved_on_leave),
            Figure("moved by a join", self.moved_on_join),
        ]

    def document(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


def _percentile(counts: npt.NDArray[np.int64], percent: float) -> float:
    """Of numbers of which `counts[k]` are k; as numpy does it, without a list of them all."""
    ends = np.cumsum(counts)
    at = percent / 100 * (int(ends[-1]) - 1)
    below = math.floor(at)
    low, high = np.searchsorted(ends, [below, math.ceil(at)], side="right").tolist()
    return float(low + (high - low) * (at - below))


def _share(tallies: Sequence[Tally], part: str, whole: str) -> float | None:
    of = sum(getattr(tally, whole) for tally in tallies)
    return sum(getattr(tally, part) for tally in tallies) / of if of else None


def _shared(scenario: Scenario, tallies: Sequence[Tally]) -> dict[str, float]:
    """Narrow to broad, every level that some host has."""
    if not any(scenario.hosts):
        return {}
    depths = [i for i, level in enumerate(scenario.levels) if any(level in place for place in scenario.hosts)]
    names = {**{i: scenario.levels[i] for i in reversed(depths)}, -1: NOWHERE}
    total = scenario.targets * len(tallies)
    return {name: sum(tally.depths.get(depth, 0) for tally in tallies) / total for depth, name in names.items()}
