"""The policies of this pack: each scores columns of candidates and ranks them, highest first, ties in input order.

Invariants: a policy captures its configuration when it is made, and ranking is a function of that, the candidates and the
target (`random` excepted, whose point it is not to be one). A ranking is a permutation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mx_common import envs
from mx_common._candidates import Candidate, Target, depths, digests, unit_hashes
from mx_common.source_load import read_loads
from mx_common.topology import levels, local_topology, shared_depth

__all__ = ["BUILT_IN", "Balanced", "LoadAware", "Policy", "Random", "Ranking", "RendezvousHash", "TopologyAware"]

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

# `balanced`: a source at full load keeps a hundredth of its headroom, so that a fleet at full load is still spread
_LEAST_HEADROOM = 0.01
# a tier whose mean headroom is below this is ranked together with the next one
_SPILL_HEADROOM = 0.2
# a hair, so that loads of exactly 0.8 do not spill for the rounding of 1 - 0.8
_ROUNDING = 1e-9
# of so many attempts, one lies outside the domain of the first
_ATTEMPTS = 3


@dataclass(frozen=True)
class Ranking:
    """`rank`: indices of the candidates, best first. The columns it came from, where the policy has them, are in input order:
    `score`, `depth` (-1: nothing shared), `tier` (0 is tried first)."""

    rank: Whole
    score: Floats | None = None
    depth: Whole | None = None
    tier: Whole | None = None


class Policy(ABC):
    """A policy of this pack: a selector that can give its reasons."""

    name: ClassVar[str]

    @abstractmethod
    def ranking(self, candidates: Sequence[Candidate], target: Target) -> Ranking:
        """Rank the candidates, with the columns it came from."""

    def order(self, candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
        """The candidates, best first."""
        return [candidates[i] for i in self.ranking(candidates, target).rank.tolist()]


class Random(Policy):
    """A shuffle, different at each call. `rng`: where it comes from, for a simulation that can be repeated."""

    name = "random"

    def __init__(self, rng: np.random.Generator | None = None) -> None:
        self._rng = rng

    def ranking(self, candidates: Sequence[Candidate], target: Target) -> Ranking:
        # a generator of its own each time: nothing to share between threads, or between processes after a fork
        rng = np.random.default_rng() if self._rng is None else self._rng
        return Ranking(rng.permutation(len(candidates)))


class RendezvousHash(Policy):
    """Highest digest first: each target has its own order, and a source that joins or leaves moves no other."""

    name = "rendezvous_hash"

    def ranking(self, candidates: Sequence[Candidate], target: Target) -> Ranking:
        digest = digests(candidates, target)
        return Ranking(np.argsort(~digest, kind="stable"), score=unit_hashes(digest))


class LoadAware(Policy):
    """Unit hash minus weighted load."""

    name = "load_aware"

    def __init__(self, weight: float | None = None) -> None:
        self._weight = envs.LOAD_WEIGHT.get() if weight is None else weight

    def ranking(self, candidates: Sequence[Candidate], target: Target) -> Ranking:
        score = unit_hashes(digests(candidates, target)) - self._weight * _loads(candidates)
        return Ranking(np.argsort(-score, kind="stable"), score=score)


class TopologyAware(Policy):
    """Nearest first; among equally near ones, unit hash minus weighted load."""

    name = "topology_aware"

    def __init__(
        self,
        weight: float | None = None,
        local: Mapping[str, str] | None = None,
        level_names: Sequence[str] | None = None,
    ) -> None:
        self._weight = _topology_weight() if weight is None else weight
        self._local = local_topology() if local is None else dict(local)
        self._levels = levels() if level_names is None else tuple(level_names)

    def ranking(self, candidates: Sequence[Candidate], target: Target) -> Ranking:
        depth = depths(candidates, self._local, self._levels)
        score = unit_hashes(digests(candidates, target)) - self._weight * _loads(candidates)
        return Ranking(np.lexsort((-score, -depth)), score=score, depth=depth)


class Balanced(Policy):
    """Tiers by shared depth; inside a tier, rendezvous hashing weighted by the square of the headroom.

    A source is picked in proportion to its weight, so targets that share one stale snapshot spread out instead of herding on
    the source that looks idle. Locality is a preference, not a wall: a tier that is nearly full is ranked together with the
    next one, and the first attempts do not all lie in one failure domain.
    """

    name = "balanced"

    def __init__(self, local: Mapping[str, str] | None = None, level_names: Sequence[str] | None = None) -> None:
        self._local = local_topology() if local is None else dict(local)
        self._levels = levels() if level_names is None else tuple(level_names)

    def ranking(self, candidates: Sequence[Candidate], target: Target) -> Ranking:
        depth = depths(candidates, self._local, self._levels)
        headroom = np.maximum(1.0 - _loads(candidates), _LEAST_HEADROOM)
        unit = np.clip(unit_hashes(digests(candidates, target)), 2.0**-64, 1.0 - 2.0**-53)
        score = -(headroom**2) / np.log(unit)
        tier = _tiers(depth, headroom)
        rank = np.lexsort((-score, tier))
        return Ranking(self._spread(rank, candidates), score=score, depth=depth, tier=tier)

    def _spread(self, rank: Whole, candidates: Sequence[Candidate]) -> Whole:
        """Make the best source outside the first one's narrowest domain the last of the first attempts, if none of them is."""
        if len(rank) <= _ATTEMPTS:
            return rank
        first = candidates[rank[0]].topology
        narrowest = shared_depth(first, first, self._levels)
        if narrowest < 0:  # it has no topology, and nothing is outside of nowhere
            return rank
        depth = (shared_depth(first, candidates[i].topology, self._levels) for i in rank.tolist())
        place = next((place for place, shared in enumerate(depth) if shared < narrowest), 0)
        if place < _ATTEMPTS:
            return rank
        return np.insert(np.delete(rank, place), _ATTEMPTS - 1, rank[place])


BUILT_IN: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Random, RendezvousHash, LoadAware, TopologyAware, Balanced)
}


def _loads(candidates: Sequence[Candidate]) -> Floats:
    return read_loads([c.source_load for c in candidates])


def _topology_weight() -> float:
    if envs.TOPOLOGY_LOAD_WEIGHT.is_set():
        return envs.TOPOLOGY_LOAD_WEIGHT.get()
    envs.TOPOLOGY_LOAD_WEIGHT.get()  # a text that cannot be used is warned about
    return envs.LOAD_WEIGHT.get() if envs.LOAD_WEIGHT.is_set() else 0.0


def _tiers(depth: Whole, headroom: Floats) -> Whole:
    """The tier of each candidate: one for each depth, nearest first, where a tier that is nearly full takes in the next
    depth."""
    slot = depth + 1
    counts = np.bincount(slot)
    sums = np.bincount(slot, weights=headroom)
    tier_of = np.zeros(len(counts), np.int64)
    tier, members, room = 0, 0, 0.0
    for level in range(len(counts) - 1, -1, -1):
        if not counts[level]:
            continue
        if members and room / members >= _SPILL_HEADROOM - _ROUNDING:
            tier, members, room = tier + 1, 0, 0.0
        tier_of[level] = tier
        members, room = members + int(counts[level]), room + float(sums[level])
    return tier_of[slot]
