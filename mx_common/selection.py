"""Which sources a target may read from, and in which order it tries them.

    kept, dropped = funnel(candidates, target, Eligibility(accelerator="cuda", oldest_updated_at=now_ms - 90_000))
    for candidate in get_configured_selector().order(kept, target)[:3]: ...

`MX_P2P_SOURCE_SELECTOR` names the policy: `random`, `rendezvous_hash`, `load_aware`, `topology_aware`, `balanced`, or one
that was registered here or through the entry-point group `mx_common.selectors`. Invariant: choosing a source never fails a
load. An unknown policy, and one that raises, is replaced by `random` with one warning, and an order is always a permutation
of what was to be ordered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, Literal, Protocol, cast

from mx_common import envs
from mx_common._candidates import Candidate, Target, digests, identity_digest, unit_hashes
from mx_common._once import warn_once
from mx_common._policies import BUILT_IN, Policy, Random, Ranking
from mx_common.errors import ConfigError
from mx_common.source_load import read_load

__all__ = [
    "Candidate",
    "DropReason",
    "Eligibility",
    "Explanation",
    "Ordering",
    "Selector",
    "Target",
    "configured_policy_label",
    "drop_reason",
    "explain",
    "funnel",
    "get_configured_selector",
    "get_selector",
    "identity_digest",
    "known_policies",
    "ordered_by",
    "policy_factory",
    "register_selector",
]

log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "mx_common.selectors"

DropKind = Literal["self", "gone", "rank", "accelerator", "old"]


class Selector(Protocol):
    """Orders sources. Its configuration is fixed when it is made."""

    @property
    def name(self) -> str:
        """The policy that really runs."""

    def order(self, candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
        """The candidates, best first."""


class Ordering(Protocol):
    """All that a third-party policy needs."""

    def order(self, candidates: Sequence[Candidate], target: Target) -> list[Candidate]: ...


@dataclass(frozen=True)
class Eligibility:
    """What a source must satisfy besides its rank: the target's accelerator ("": any), its last heartbeat no older than
    `oldest_updated_at` (ms by the directory's clock, 0: any), and not one of the workers known to have ended."""

    accelerator: str = ""
    oldest_updated_at: int = 0
    gone_workers: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if isinstance(self.gone_workers, str):
            raise ConfigError(f"Eligibility.gone_workers={self.gone_workers!r}: give a set of worker ids, not one text")
        object.__setattr__(self, "gone_workers", frozenset(self.gone_workers))


_ANY = Eligibility()


@dataclass(frozen=True)
class DropReason:
    """Why a candidate may not be read from: `words` for a log line, `kind` the same in one word, for counting."""

    kind: DropKind
    words: str

    def __str__(self) -> str:
        return self.words


def drop_reason(candidate: Candidate, target: Target, eligibility: Eligibility = _ANY) -> DropReason | None:
    """Why this candidate may not be read from; None when it may."""
    if candidate.worker_id == target.worker_id:
        return DropReason("self", "the target itself")
    if candidate.worker_id in eligibility.gone_workers:
        return DropReason("gone", "a process of this host that has ended")
    if candidate.worker_rank != target.worker_rank:
        return DropReason("rank", f"rank {candidate.worker_rank}, wanted {target.worker_rank}")
    theirs, ours = candidate.accelerator, eligibility.accelerator
    if theirs and ours and theirs != ours:
        return DropReason("accelerator", f"accelerator {theirs}, wanted {ours}")
    late = eligibility.oldest_updated_at - candidate.updated_at
    if eligibility.oldest_updated_at and late > 0:
        return DropReason("old", f"last heartbeat {late / 1000:.1f} s older than allowed")
    return None


def funnel(
    candidates: Iterable[Candidate], target: Target, eligibility: Eligibility = _ANY
) -> tuple[list[Candidate], list[tuple[Candidate, DropReason]]]:
    """Split candidates into those that may be read from, and the others with their reasons. Both keep the input's order."""
    kept: list[Candidate] = []
    dropped: list[tuple[Candidate, DropReason]] = []
    for candidate in candidates:
        reason = drop_reason(candidate, target, eligibility)
        if reason is None:
            kept.append(candidate)
        else:
            dropped.append((candidate, reason))
    return kept, dropped


class _Guarded:
    """A third-party policy as a selector: whatever it does, the result is an order."""

    def __init__(self, name: str, policy: Ordering) -> None:
        self.name = name
        self._policy = policy

    def order(self, candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
        try:
            return ordered_by(self._policy, candidates, target)
        except Exception as error:  # third-party code runs inside a load here, and a load must go on whatever that does
            warn_once(log, ("policy", self.name), "source policy %s failed (%r); using random", self.name, error)
            return Random().order(candidates, target)


def ordered_by(policy: Ordering, candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
    """The order a policy gives, which is its own list. Raises what the policy raises, and ValueError for an answer that is not
    the candidates in some order."""
    ordered = list(policy.order(list(candidates), target))
    if sorted(map(id, ordered)) != sorted(map(id, candidates)):
        raise ValueError(f"it returned {len(ordered)} items that are not the {len(candidates)} candidates in some order")
    return ordered


_registered: dict[str, Callable[[], Ordering]] = {}


def register_selector(name: str, factory: Callable[[], Ordering]) -> None:
    """Make `factory()` the policy `name`; a later registration of the same name replaces it.

    What the factory returns needs one method, `order(candidates, target)`. Raises ConfigError for a name of this pack or a
    factory that cannot be called.
    """
    key = _key(name)
    if not key or key in BUILT_IN:
        raise ConfigError(f"a source policy cannot be registered as {name!r}: choose a name other than {', '.join(BUILT_IN)}")
    if not callable(factory):
        raise ConfigError(f"the factory of source policy {name!r} is {factory!r}: give a callable without arguments")
    _registered[key] = factory


def known_policies() -> list[str]:
    """Every name `get_selector` knows."""
    return [*BUILT_IN, *sorted({*_registered, *_entry_points()} - set(BUILT_IN))]


def policy_factory(name: str) -> Callable[[], Ordering]:
    """What makes a policy of this name, each time configured from the environment as it is then, and lets it fail.

    Raises ConfigError for a name nobody knows, and whatever loading a third party's factory raises; so does calling what is
    returned.
    """
    factory = _find(_key(name))
    if factory is None:
        raise ConfigError(f"no source policy is named {name!a}; known: {', '.join(known_policies())}")
    return partial(_make, factory)


def get_selector(name: str) -> Selector:
    """The selector of a policy, configured from the environment as it is now; `random`, with one warning, when there is
    none."""
    key = _key(name)
    try:
        if key in BUILT_IN:
            return BUILT_IN[key]()
        factory = _find(key)
        if factory is None:
            known = ", ".join(known_policies())
            warn_once(log, ("policy", key), "source policy %s is unknown; using random. Known: %s", ascii(name), known)
            return Random()
        policy = _make(factory)
    except Exception as error:  # third-party code again: a policy that cannot be made must not stop a load
        known = ", ".join(known_policies())
        warn_once(
            log, ("policy", key), "source policy %s cannot be made (%r); using random. Known: %s", ascii(name), error, known
        )
        return Random()
    return _Guarded(key, policy)


def _find(key: str) -> Callable[[], Ordering] | None:
    if key in BUILT_IN:
        return BUILT_IN[key]
    if key in _registered:
        return _registered[key]
    entry_point = _entry_points().get(key)
    return None if entry_point is None else cast("Callable[[], Ordering]", entry_point.load())


def _make(factory: Callable[[], Ordering]) -> Ordering:
    policy = factory()
    if not callable(getattr(policy, "order", None)):
        raise TypeError(f"{policy!r} has no method order(candidates, target)")
    return policy


def get_configured_selector() -> Selector:
    """The selector `MX_P2P_SOURCE_SELECTOR` names."""
    return get_selector(envs.SOURCE_SELECTOR.get())


def configured_policy_label() -> str:
    """Name of the policy that really runs under the present settings."""
    return get_configured_selector().name


@dataclass(frozen=True)
class Explanation:
    """One candidate's way through a selection: its place in the order (1 is tried first) or why it was dropped, and the parts
    its score was made of. A part the policy does not use, or that was not computed because the candidate was dropped, is
    None."""

    candidate: Candidate
    place: int | None
    dropped: str | None
    digest: int
    unit_hash: float
    load: float
    depth: int | None = None
    score: float | None = None
    tier: int | None = None


def explain(
    candidates: Iterable[Candidate],
    target: Target,
    *,
    eligibility: Eligibility = _ANY,
    selector: Selector | None = None,
) -> list[Explanation]:
    """Every candidate, in the order it would be tried, then the dropped ones. The configured selector when none is given."""
    selector = get_configured_selector() if selector is None else selector
    kept, dropped = funnel(candidates, target, eligibility)
    if isinstance(selector, Policy):
        ranking = selector.ranking(kept, target)
        rows = [(kept[i], _parts(ranking, i)) for i in ranking.rank.tolist()]
    else:
        rows = [(candidate, {}) for candidate in selector.order(kept, target)]
    placed = [_explanation(candidate, target, place=i, **parts) for i, (candidate, parts) in enumerate(rows, start=1)]
    return placed + [_explanation(candidate, target, dropped=reason.words) for candidate, reason in dropped]


def _parts(ranking: Ranking, index: int) -> dict[str, Any]:
    columns = {"depth": ranking.depth, "score": ranking.score, "tier": ranking.tier}
    return {name: column[index].item() for name, column in columns.items() if column is not None}


def _explanation(
    candidate: Candidate, target: Target, *, place: int | None = None, dropped: str | None = None, **parts: Any
) -> Explanation:
    digest = digests((candidate,), target)
    load = read_load(candidate.source_load)
    return Explanation(candidate, place, dropped, int(digest[0]), float(unit_hashes(digest)[0]), load, **parts)


def _key(name: str) -> str:
    return name.strip().lower() if isinstance(name, str) else ""


def _entry_points() -> dict[str, metadata.EntryPoint]:
    return {_key(point.name): point for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
