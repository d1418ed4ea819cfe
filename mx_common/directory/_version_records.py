"""What is known about a version of trained weights: what its publisher asked for, its shards, and its readers' leases.

    VersionSpec(model_name="m", slots=("rank0", "rank1"), number=7)

Values only; `versions` is what changes them. Invariant: a `Version` is a picture of one moment, and a READY one misses no slot.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from mx_common.errors import ConfigError, DirectoryRefused

__all__ = ["Kind", "Lease", "Refusal", "Shard", "State", "Version", "VersionSpec"]

MAX_SLOTS = 65536
MAX_NAME_BYTES = 4096

Kind = Literal["unknown", "exists", "state", "invalid", "full"]


class State(IntEnum):
    """The states of a version, with the numbers that they have on the wire."""

    STAGING = 1
    READY = 2
    RELEASING = 3


class Refusal(DirectoryRefused):
    """A request that a `VersionStore` does not grant; `kind` says why, for whoever answers in another vocabulary."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind: Kind = kind


def check_name(what: str, value: str) -> None:
    """Raise `ConfigError` unless `value` names something and fits a record."""
    size = len(value.encode())
    if not 0 < size <= MAX_NAME_BYTES:
        raise ConfigError(f"{what} has {size} bytes; it has to name something, in 1 to {MAX_NAME_BYTES}")


@dataclass(frozen=True)
class VersionSpec:
    """A version as its publisher wants it. Raises `ConfigError` for one that could never become READY, or never be told apart.

    `slots`: every source slot that will publish a shard. `number`: the publisher's own count; None takes one more than the highest
    of the model. `run`: names one start of the trainer; what a run that began later publishes is newer, whatever its numbers. `uid`:
    empty lets the store make one. `idempotency_key`: creating again under it gives the same version; a publisher that starts over
    needs another. `object_storage`: (uri, type) of weights that no worker holds; only such a version may have no slots, and be `ready`
    from the start.
    """

    model_name: str
    slots: tuple[str, ...]
    number: int | None = None
    run: str = ""
    uid: str = ""
    idempotency_key: str = ""
    payload_format: int = 1
    base_version_id: str | None = None
    object_storage: tuple[str, int] | None = None
    ready: bool = False

    def __post_init__(self) -> None:
        check_name("model_name", self.model_name)
        for what, text in (("run", self.run), ("uid", self.uid), ("idempotency_key", self.idempotency_key)):
            if text:
                check_name(what, text)
        if len(self.slots) > MAX_SLOTS:
            raise ConfigError(f"{len(self.slots)} expected source slots; at most {MAX_SLOTS} are kept")
        for slot in self.slots:
            check_name("an expected source slot", slot)
        if len(set(self.slots)) != len(self.slots):
            twice = sorted(slot for slot, count in Counter(self.slots).items() if count > 1)[:5]
            raise ConfigError(f"expected source slots {twice} are named more than once; give every trainer rank its own slot")
        if not self.slots and self.object_storage is None:
            raise ConfigError(
                "a version without expected source slots and without object storage has no weights; name its slots"
            )
        if self.ready and self.object_storage is None:
            raise ConfigError(
                "only a version in object storage is READY when it is made; create it STAGING and publish its shards"
            )
        if self.ready and self.slots:
            raise ConfigError("a version that expects shards cannot be READY when it is made; create it STAGING")
        if self.number is not None and not 0 <= self.number < 1 << 64:
            raise ConfigError(f"version number {self.number} does not fit 64 bits without sign; count from 0")

    @property
    def content(self) -> tuple[object, ...]:
        """What has to be equal for a repeated request to mean the same version; ranks may name the slots in any order."""
        kept = (self.model_name, self.number, self.run, self.idempotency_key, self.payload_format, self.base_version_id)
        return (*kept, self.object_storage, self.ready, tuple(sorted(self.slots)))


@dataclass(frozen=True)
class Shard:
    """The part of a version that one slot holds. `manifest_endpoint`: `host:port` of the holder's manifest service.

    `manifest_digest`: of the manifest's bytes. `layout_signature`: of the manifest without addresses; may be empty. Raises
    `ConfigError` for a shard that no reader could ask for.
    """

    version_id: str
    slot: str
    worker_id: str
    manifest_digest: str
    manifest_endpoint: str
    tensor_count: int = 0
    total_bytes: int = 0
    layout_signature: str = ""

    def __post_init__(self) -> None:
        for name in ("version_id", "slot", "worker_id", "manifest_digest", "manifest_endpoint"):
            check_name(f"{name} of a shard", getattr(self, name))


@dataclass(frozen=True)
class Lease:
    """A reader's hold on a version. `ttl`: seconds, as granted. `until`: by the store's monotonic clock; `until_ms`: by its date."""

    lease_id: str
    version_id: str
    worker_id: str
    ttl: int
    until: float
    until_ms: int


@dataclass(frozen=True)
class Version:
    """A version at one moment. `order` counts a store's versions from 1; `why` says what made it RELEASING."""

    uid: str
    spec: VersionSpec
    number: int
    order: int
    state: State
    created_at_ms: int
    shards: tuple[Shard, ...]
    open_leases: int
    why: str = ""

    @property
    def missing(self) -> tuple[str, ...]:
        """The expected slots without a shard, in the order in which they were named."""
        have = {shard.slot for shard in self.shards}
        return tuple(slot for slot in self.spec.slots if slot not in have)

    @property
    def layout_signature(self) -> str:
        """One signature for all shards; empty until every slot has a shard that carries one."""
        if self.missing or not self.shards or not all(shard.layout_signature for shard in self.shards):
            return ""
        lines = sorted(f"{len(shard.slot)} {shard.slot} {shard.layout_signature}\n" for shard in self.shards)
        return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()

    def __str__(self) -> str:
        return f"version {self.uid} (number {self.number} of {self.spec.model_name})"
