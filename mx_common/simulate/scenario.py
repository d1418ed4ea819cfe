"""The fleet of a simulation, as a value: how busy its sources are, where they are, how many targets come at once.

    Scenario(loads=(0.9,) * 4 + (0.0,) * 12, targets=64)
    Scenario(loads=(0.0,) * 32, targets=128, hosts=grid(2, 4, 4), levels=LEVELS)
    hosts_and_loads = parse_snapshot(text)              # what `mx sources --json` printed, or a list of loads

Invariant: a scenario that can be made can be run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from mx_common._frozen import FrozenMap
from mx_common.errors import ConfigError
from mx_common.source_load import as_float, read_loads

__all__ = [
    "BUSY_LOAD",
    "LEVELS",
    "MAX_SOURCES",
    "MAX_TARGETS",
    "MAX_TRIALS",
    "Place",
    "Scenario",
    "grid",
    "parse_snapshot",
]

# from this load on a source counts as busy in the figures
BUSY_LOAD = 0.8
LEVELS = ("zone", "rack", "host")

# what keeps a simulation within a few GB
MAX_SOURCES = MAX_HOSTS = 100_000
MAX_TARGETS = 400_000
MAX_TRIALS = 100_000
MAX_PICKS = 20_000_000  # trials x sources, of each of which the picks are kept

Place = Mapping[str, str]


@dataclass(frozen=True)
class Scenario:
    """`loads`: of each source, 0 to 1, None where it publishes none. `targets` choose one after the other; nobody is done before the
    last has chosen.

    `noise`: standard deviation of a published load around the true one, drawn for each trial. `fresh`: share of targets that see the
    readers of the sources at their turn, over `max_readers`, as a part of the load; the others share the first snapshot. `hosts`: places,
    level to value; source i is at place i modulo their number, a target at any with equal chance; `levels` broad to narrow. `leaving`: so
    many sources leave afterwards, and all targets choose again. `attempts`: sources that a target tries. Raises ConfigError, also for a
    fleet that is too large for memory.
    """

    loads: tuple[float | None, ...]
    targets: int
    trials: int = 300
    seed: int = 0
    noise: float = 0.0
    fresh: float = 0.0
    max_readers: int = 8
    hosts: tuple[Place, ...] = ()
    levels: tuple[str, ...] = LEVELS
    leaving: int = 0
    attempts: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "loads", tuple(self.loads))
        object.__setattr__(self, "hosts", tuple(FrozenMap(place) for place in self.hosts))
        object.__setattr__(self, "levels", tuple(self.levels))
        if not self.loads:
            raise ConfigError("a fleet without sources cannot be simulated: give at least one load")
        for load in self.loads:
            if load is not None and not 0 <= load <= 1:
                raise ConfigError(f"the load of a source is {load!r}: give a number from 0 to 1, None when it publishes none")
        for name, count, most in (("sources", self.sources, MAX_SOURCES), ("hosts", len(self.hosts), MAX_HOSTS)):
            if count > most:
                raise ConfigError(f"a fleet of {count} {name} is too large: give at most {most}")
        for name, least in (("targets", 1), ("trials", 1), ("seed", 0), ("max_readers", 1), ("leaving", 0), ("attempts", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r}: give a whole number from {least}")
        for name, most in (("targets", MAX_TARGETS), ("trials", MAX_TRIALS)):
            if getattr(self, name) > most:
                raise ConfigError(f"{name}={getattr(self, name)}: give at most {most}")
        if self.trials * self.sources > MAX_PICKS:
            raise ConfigError(
                f"{self.trials} trials of {self.sources} sources are too many to keep in memory: give at most "
                f"{MAX_PICKS // self.sources} trials"
            )
        for name in ("noise", "fresh"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: give a number from 0 to 1")
        if self.leaving >= len(self.loads):
            raise ConfigError(f"leaving={self.leaving} of {len(self.loads)} sources: at least one has to stay")

    @property
    def sources(self) -> int:
        return len(self.loads)

    @property
    def share(self) -> float:
        """Targets a source has when all have the same number, and at least 1: a target cannot use more than a whole source."""
        return max(1.0, self.targets / self.sources)

    @property
    def busy(self) -> tuple[int, ...]:
        """Numbers of the sources whose load, as a policy takes it, is `BUSY_LOAD` or more."""
        return tuple(i for i, load in enumerate(read_loads(self.loads).tolist()) if load >= BUSY_LOAD)


def grid(zones: int, racks: int, hosts: int) -> tuple[Place, ...]:
    """Places of a regular fleet: so many zones, racks in each zone, hosts in each rack. Zones alternate, so that few sources already
    spread over all of them. Raises ConfigError."""
    if min(zones, racks, hosts) < 1:
        raise ConfigError(f"a topology of {zones} x {racks} x {hosts} has no host: give zones, racks and hosts from 1")
    if zones * racks * hosts > MAX_HOSTS:
        raise ConfigError(
            f"a topology of {zones} x {racks} x {hosts} has {zones * racks * hosts} hosts: give one of at most {MAX_HOSTS}"
        )
    return tuple(
        FrozenMap(zone=f"z{zone}", rack=f"r{rack}", host=f"h{host}")
        for host, rack, zone in product(range(hosts), range(racks), range(zones))
    )


def parse_snapshot(text: str) -> tuple[tuple[float | None, ...], tuple[Place, ...]]:
    """Loads and places out of JSON: what `mx sources --json` printed, or a list of loads (no places then).

    Of a directory's sources those count that a load could read from: READY, of the lowest rank that is there. Raises ConfigError when
    they are not all of one identity, or there are none.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"loads are not JSON ({error}): give what `mx sources --json` prints, or a list of numbers"
        ) from error
    if isinstance(document, list):
        return tuple(_load(value) for value in document), ()
    rows = document.get("sources") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError("loads have no list of sources: give what `mx sources --json` prints, or a list of numbers")
    ready = [row for row in rows if row.get("status") == "READY" and not row.get("ended")]
    if not ready:
        raise ConfigError(f"none of the {len(rows)} sources is READY: there is nothing to choose from")
    identities = {(str(row.get("model")), str(row.get("mx_source_id"))) for row in ready}
    if len(identities) > 1:
        named = ", ".join(sorted(f"{model} {source_id}" for model, source_id in identities))
        raise ConfigError(f"sources are of {len(identities)} identities ({named}): keep those of one, a target sees no other")
    lowest = min(_rank(row) for row in ready)
    kept = [row for row in ready if _rank(row) == lowest]
    return tuple(_load(row.get("source_load")) for row in kept), tuple(_place(row) for row in kept)


def _load(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"the load of a source is {value!r}: give a number from 0 to 1, null when it publishes none")
    return as_float(value)


def _rank(row: dict[str, Any]) -> int:
    rank = row.get("rank", 0)
    return rank if isinstance(rank, int) else 0


def _place(row: dict[str, Any]) -> Place:
    place = row.get("topology")
    return FrozenMap({str(level): str(value) for level, value in place.items()} if isinstance(place, dict) else {})
