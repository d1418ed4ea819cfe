"""Which versions of a model are newer, which a newer one supersedes, and which go when there are too many.

    for old in superseded(ready, entries, keep=1): ...

Functions of entries to entries, without a clock. Invariant: the newest READY version is never chosen to go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mx_common.directory._version_records import Lease, Shard, State, Version, VersionSpec

__all__ = ["Entry", "shown", "superseded", "too_many"]

SHOWN = 8


@dataclass(eq=False)
class Entry:
    """A version as a store changes it. `era` is the place of its run among the model's; `created` seconds by the store's clock."""

    uid: str
    spec: VersionSpec
    number: int
    era: int
    order: int
    created: float
    created_ms: int
    state: State = State.STAGING
    shards: dict[str, Shard] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    why: str = ""

    @property
    def rank(self) -> tuple[int, int, int]:
        """Orders the versions of a model; of two with one number in one run, the later made is the newer."""
        return (self.era, self.number, self.order)

    def picture(self) -> Version:
        """This version at this moment."""
        shards = tuple(self.shards[slot] for slot in self.spec.slots if slot in self.shards)
        facts = (self.uid, self.spec, self.number, self.order, self.state, self.created_ms)
        return Version(*facts, shards, len(self.leases), self.why)


def shown(names: Iterable[str]) -> str:
    """The names for a message, the first few of many."""
    named = list(names)
    rest = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
    return ", ".join(map(ascii, named[:SHOWN])) + rest


def superseded(ready: Entry, entries: Sequence[Entry], keep: int) -> list[Entry]:
    """What `ready`, which has just become READY, releases among the `entries` of its model: READY ones older than it, but for the
    `keep` - 1 newest of them and for those that a version which stays builds on."""
    older = sorted((e for e in entries if e.state == State.READY and e.rank < ready.rank), key=lambda e: e.rank, reverse=True)
    candidates = older[keep - 1 :]
    staying = [e for e in entries if e.state != State.RELEASING and e not in candidates]
    needed = _bases(staying, {e.uid: e for e in entries})
    return [e for e in candidates if e.uid not in needed]


def too_many(entries: Sequence[Entry], newcomer: Entry, most: int) -> list[Entry]:
    """The entries of a model that go so that `most` stay: those being released first, then the oldest; never `newcomer`."""
    latest = max((e for e in entries if e.state == State.READY), key=lambda e: e.rank, default=None)
    spared = [e for e in entries if e is not newcomer and e is not latest]
    spared.sort(key=lambda e: (e.state != State.RELEASING, e.order))
    return spared[: max(0, len(entries) - most)]


def _bases(entries: Iterable[Entry], by_uid: dict[str, Entry]) -> set[str]:
    """The versions that `entries` are differences to, however many steps back."""
    found: set[str] = set()
    todo = [entry.spec.base_version_id for entry in entries]
    while todo:
        uid = todo.pop()
        if uid and uid not in found:
            found.add(uid)
            if uid in by_uid:
                todo.append(by_uid[uid].spec.base_version_id)
    return found
