"""Runs a scenario: draws fleets, asks the policy for each target, counts.

    simulate(Scenario(loads=(0.0,) * 8, targets=32, leaving=1), "rendezvous_hash").moved_on_leave       # 0.0

Invariant: a trial's fleet is drawn from the seed and the trial's number alone, so that every policy meets the same fleets. Each target
has a policy of its own, made at the target's place, as each process of a fleet does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from mx_common._policies import Random
from mx_common.errors import ConfigError
from mx_common.selection import Candidate, Ordering, Target, ordered_by, policy_factory
from mx_common.simulate.figures import Figures, Tally
from mx_common.simulate.scenario import Place, Scenario
from mx_common.topology import seen_from, shared_depth

__all__ = ["simulate"]

_MODEL, _SOURCE_ID = "m", "3f0cd0e873a0000c"
_FLEET, _POLICY = range(2)
_NOWHERE: Place = {}


def simulate(scenario: Scenario, policy: str, on_trial: Callable[[], None] | None = None) -> Figures:
    """What the policy of this name does in the scenario; `on_trial` is called after each trial.

    Takes trials x targets orderings, twice as many when sources leave: 300 trials of 128 targets and 32 sources a few seconds. Memory
    grows with hosts, targets and trials x sources. Raises
    ConfigError for a policy that does not exist, cannot be made, or fails: there is no falling back to `random` here.
    """
    domains = _Domains(scenario)
    tallies = []
    try:
        make = policy_factory(policy)
        for number in range(scenario.trials):
            if policy.strip().lower() == Random.name:
                make = partial(Random, np.random.default_rng((scenario.seed, number, _POLICY)))
            tallies.append(_trial(_Fleet.of(scenario, number), make, domains))
            if on_trial is not None:
                on_trial()
    except ConfigError:
        raise
    except Exception as error:  # third-party code, which a load would replace by `random`: figures of that would mislead
        raise ConfigError(f"source policy {policy!a} failed ({error!r}): a load would use random in its place") from error
    return Figures.of(scenario, tallies)


@dataclass(frozen=True)
class _Fleet:
    """One trial's draw. `hosts` of the targets are numbers of places."""

    scenario: Scenario
    candidates: list[Candidate]
    targets: list[Target]
    hosts: list[int]
    fresh: list[bool]
    leaving: frozenset[int]

    @classmethod
    def of(cls, scenario: Scenario, number: int) -> _Fleet:
        rng = np.random.default_rng((scenario.seed, number, _FLEET))
        places = scenario.hosts or (_NOWHERE,)
        noise = rng.normal(0.0, scenario.noise, scenario.sources).tolist()
        candidates = [
            Candidate(
                _SOURCE_ID,
                rng.bytes(16).hex(),
                0,
                topology=places[i % len(places)],
                source_load=None if load is None else min(max(load + noise[i], 0.0), 1.0),
            )
            for i, load in enumerate(scenario.loads)
        ]
        return cls(
            scenario,
            candidates,
            targets=[Target(_MODEL, rng.bytes(16).hex(), 0) for _ in range(scenario.targets)],
            hosts=rng.integers(len(places), size=scenario.targets).tolist(),
            fresh=(rng.random(scenario.targets) < scenario.fresh).tolist(),
            leaving=frozenset(rng.choice(scenario.sources, scenario.leaving, replace=False).tolist()),
        )

    def refreshed(self, picks: npt.NDArray[np.int64]) -> list[Candidate]:
        """The sources as they publish themselves once these picks are reading: the larger of their load and their readers."""
        most = self.scenario.max_readers
        return [
            replace(c, source_load=max(c.source_load or 0.0, min(readers / most, 1.0))) if readers else c
            for c, readers in zip(self.candidates, picks.tolist(), strict=True)
        ]


@dataclass(frozen=True)
class _Domains:
    """What hosts and sources share, worked out for the pairs that come up: a table of all pairs would outgrow the fleet."""

    scenario: Scenario

    @cached_property
    def common(self) -> int:
        """In so many levels, from the broadest on, all sources are at one place."""
        used = self.scenario.hosts[: self.scenario.sources]
        differ = (i for i, level in enumerate(self.scenario.levels) if len({place.get(level) for place in used}) > 1)
        return next(differ, len(self.scenario.levels))

    def place(self, source: int) -> Place:
        """Where a source is."""
        hosts = self.scenario.hosts
        return hosts[source % len(hosts)] if hosts else _NOWHERE

    def depth(self, host: int, source: int) -> int:
        """Of the narrowest level that a target's host shares with a source."""
        return shared_depth(self.scenario.hosts[host], self.place(source), self.scenario.levels) if self.scenario.hosts else -1

    def has_outside(self, source: int) -> bool:
        """Whether some source is outside the narrowest domain of this one."""
        return self._narrowest(source) >= self.common

    def goes_outside(self, first: int, tried: list[int]) -> bool:
        """Whether one of those tried is outside the narrowest domain of the first."""
        place, narrowest = self.place(first), self._narrowest(first)
        return any(shared_depth(place, self.place(other), self.scenario.levels) < narrowest for other in tried)

    def _narrowest(self, source: int) -> int:
        place = self.place(source)
        return shared_depth(place, place, self.scenario.levels)


def _trial(fleet: _Fleet, make: Callable[[], Ordering], domains: _Domains) -> Tally:
    scenario = fleet.scenario
    tally = Tally(np.zeros(scenario.sources, np.int64))
    number = {c.worker_id: i for i, c in enumerate(fleet.candidates)}
    for target, host, fresh in zip(fleet.targets, fleet.hosts, fleet.fresh, strict=True):
        listed = fleet.refreshed(tally.picks) if fresh else fleet.candidates
        with seen_from(scenario.hosts[host] if scenario.hosts else _NOWHERE, scenario.levels):
            order = [number[c.worker_id] for c in ordered_by(make(), listed, target)]
            if scenario.leaving:
                staying = [c for i, c in enumerate(listed) if i not in fleet.leaving]
                _count_move(tally, order[0], number[ordered_by(make(), staying, target)[0].worker_id], fleet.leaving)
        _count(tally, order[: scenario.attempts], domains, host)
    return tally


def _count(tally: Tally, tried: list[int], domains: _Domains, host: int) -> None:
    first = tried[0]
    tally.picks[first] += 1
    depth = domains.depth(host, first)
    tally.depths[depth] = tally.depths.get(depth, 0) + 1
    if domains.has_outside(first):
        tally.could_escape += 1
        tally.escaped += domains.goes_outside(first, tried)


def _count_move(tally: Tally, before: int, after: int, leaving: frozenset[int]) -> None:
    # read forwards sources leave, read backwards they join
    tally.moved += before != after
    if before not in leaving:
        tally.unaffected += 1
        tally.unaffected_moved += before != after
