"""Versions of trained weights: STAGING until every expected slot has a shard, READY while it is the newest, gone once unleased.

    versions = VersionStore(staging_seconds=600)
    made = versions.create(VersionSpec("m", ("rank0", "rank1"), number=7))
    versions.add_shard(Shard(made.uid, "rank0", "worker-a", digest, "10.0.0.5:9000"))
    lease = versions.lease(uid, "engine-0", ttl=60)          # once it is READY

A version that becomes READY supersedes those of the model that are older, by the run that made them and then by number: they are
RELEASING, take no new readers, and vanish with their last lease. One that comes late, older than the newest, is READY as well and
supersedes only what is older still. A version that others build on (`base_version_id`) is kept for as long as they are.

Everything lies in the memory of one process, whatever store its sources lie in: after a restart every reader's lease has ended and
publishers publish anew. Time is that of `clock`. Invariants: what is READY never changes its shards; what is RELEASING takes no new
lease.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from mx_common.directory._version_records import Lease, Refusal, Shard, State, Version, VersionSpec, check_name
from mx_common.directory._version_rules import Entry, shown, superseded, too_many
from mx_common.errors import ConfigError

__all__ = ["Lease", "Refusal", "Shard", "State", "Version", "VersionSpec", "VersionStore"]

log = logging.getLogger(__name__)

MAX_TTL_SECONDS = 3600
MAX_MODELS = 1024
MAX_LEASES = 4096
MAX_WORKERS = 65536
# how many versions that are gone are remembered by what became of them, and how many runs of a model
REMEMBERED = 1024


@dataclass
class _Model:
    """What outlives the versions of a model: its runs, in the order in which they began, and its highest number."""

    entries: dict[str, Entry] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)
    highest: int = -1

    def era(self, run: str) -> int:
        """The place of a run among the model's; a run that was never seen is the latest."""
        if run not in self.runs:
            self.runs[run] = max(self.runs.values(), default=0) + 1
            while len(self.runs) > REMEMBERED:
                del self.runs[next(iter(self.runs))]
        return self.runs[run]


class VersionStore:
    """Every version a directory knows; each method is safe to call from several threads and raises `Refusal` when the answer is no.

    `staging_seconds`: how long a version may wait for its shards. `lease_seconds`: of a lease whose reader names no time. `keep`: READY
    versions that a newer one leaves, itself included. `max_versions`: of one model, past which the oldest go, leased or not. `clock`:
    monotonic seconds, `wall`: seconds since the epoch; both are there to be replaced in tests.
    """

    def __init__(
        self,
        *,
        staging_seconds: float,
        lease_seconds: float = 60,
        keep: int = 1,
        max_versions: int = 64,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if not staging_seconds > 0 or keep < 1 or max_versions <= keep:
            raise ConfigError(
                f"staging_seconds={staging_seconds:g}, keep={keep} and max_versions={max_versions} keep no version alive; the time has "
                "to be above 0, keep at least 1, and max_versions more than keep"
            )
        self._staging_seconds = staging_seconds
        self._lease_seconds = lease_seconds
        self._keep = keep
        self._max_versions = max_versions
        self._clock = clock
        self._wall = wall
        self._models: dict[str, _Model] = {}
        self._entries: dict[str, Entry] = {}
        self._keys: dict[tuple[str, str], str] = {}
        self._gone: dict[str, str] = {}
        self._workers: dict[str, tuple[str, float]] = {}
        self._created = 0
        self._lock = threading.RLock()

    def create(self, spec: VersionSpec) -> Version:
        """A new version; the one that is there when its key or its uid was used for the same contents before."""
        with self._lock:
            there = self._already(spec)
            if there is not None:
                return there.picture()
            model = self._model(spec.model_name)
            self._created += 1
            number = model.highest + 1 if spec.number is None else spec.number
            model.highest = max(model.highest, number)
            made = (spec.uid or uuid.uuid4().hex, spec, number, model.era(spec.run), self._created)
            entry = Entry(*made, created=self._clock(), created_ms=int(self._wall() * 1000))
            self._entries[entry.uid] = model.entries[entry.uid] = entry
            self._gone.pop(entry.uid, None)
            if spec.idempotency_key:
                self._keys[spec.model_name, spec.idempotency_key] = entry.uid
            if spec.ready:
                self._make_ready(entry)
            for other in too_many(self._of(spec.model_name), entry, self._max_versions):
                self._drop(
                    other, f"its model has more than {self._max_versions} versions, and it was the oldest", logging.WARNING
                )
            return entry.picture()

    def get(self, uid: str) -> Version:
        """The version of `uid`; the refusal of one that is gone says what became of it."""
        with self._lock:
            return self._entry(uid).picture()

    def versions_of(self, model_name: str) -> list[Version]:
        """The versions of a model, newest first: those of its latest run, the highest number first."""
        with self._lock:
            return [entry.picture() for entry in self._of(model_name)]

    def all_versions(self) -> list[Version]:
        """The versions of every model, each model's as `versions_of` gives them."""
        with self._lock:
            return [entry.picture() for model_name in list(self._models) for entry in self._of(model_name)]

    def now_ms(self) -> int:
        """The clock of `created_at_ms`."""
        return int(self._wall() * 1000)

    def latest(self, model_name: str, least: State = State.READY) -> Version | None:
        """The newest version that is READY (or STAGING, when that is enough); None when there is none."""
        wanted = (State.READY,) if least == State.READY else (State.STAGING, State.READY)
        with self._lock:
            return next((entry.picture() for entry in self._of(model_name) if entry.state in wanted), None)

    def counts(self) -> dict[str, int]:
        """How many versions there are, by the name of their state."""
        with self._lock:
            states = [entry.state for entry in list(self._entries.values()) if self._settle(entry)]
        return {state.name: states.count(state) for state in State}

    def add_shard(self, shard: Shard) -> Version:
        """Take a slot's shard; the last one makes the version READY. The same shard again changes nothing, in any state."""
        with self._lock:
            entry = self._entry(shard.version_id)
            old = entry.shards.get(shard.slot)
            if old == shard:
                return entry.picture()
            if entry.state != State.STAGING:
                raise Refusal(
                    "state",
                    f"{entry.picture()} is {entry.state.name} and takes no shard: slot {shard.slot!a} of worker {shard.worker_id!a} comes "
                    f"after {self._history(entry)}; create a new version, under another idempotency_key",
                )
            if shard.slot not in entry.spec.slots:
                expected = shown(entry.spec.slots) or "none, it lies in object storage"
                raise Refusal("invalid", f"slot {shard.slot!a} is not expected by {entry.picture()}; expected are {expected}")
            if old is not None:
                log.warning(
                    "slot %s of %s: worker %s (manifest %s) replaces worker %s (manifest %s)",
                    shard.slot,
                    entry.picture(),
                    shard.worker_id,
                    shard.manifest_digest,
                    old.worker_id,
                    old.manifest_digest,
                )
            entry.shards[shard.slot] = shard
            if len(entry.shards) == len(entry.spec.slots):
                self._make_ready(entry)
            return entry.picture()

    def remove_shard(self, uid: str, slot: str, worker_id: str) -> bool:
        """Take a worker's shard back while the version is STAGING. False when there is no such shard of this worker."""
        with self._lock:
            entry = self._entry(uid)
            old = entry.shards.get(slot)
            if old is None or old.worker_id != worker_id:
                return False
            if entry.state != State.STAGING:
                raise Refusal(
                    "state", f"{entry.picture()} is {entry.state.name} and keeps its shards; delete the version instead"
                )
            del entry.shards[slot]
            return True

    def update_state(self, uid: str, state: State) -> Version:
        """Move a version on: STAGING to READY when it is complete, STAGING or READY to RELEASING. To where it is: nothing."""
        with self._lock:
            entry = self._entry(uid)
            if state == State.RELEASING:
                self._release(entry, "it was released by its publisher")
            elif state == State.READY and entry.state == State.STAGING:
                missing = entry.picture().missing
                if missing:
                    raise Refusal(
                        "state", f"{entry.picture()} cannot go from STAGING to READY: {shown(missing)} published no shard"
                    )
                self._make_ready(entry)
            elif state != entry.state:
                raise Refusal(
                    "state", f"{entry.picture()} cannot go from {entry.state.name} to {state.name}; create a new version"
                )
            return self._settled_picture(entry)

    def delete(self, uid: str) -> Version:
        """Release a version: RELEASING at once, gone when no lease is open."""
        with self._lock:
            entry = self._entry(uid)
            self._release(entry, "it was deleted")
            return self._settled_picture(entry)

    def revoke(self, uid: str) -> int:
        """Release a version and end its leases now, for a publisher that can wait no longer. Returns how many leases ended."""
        with self._lock:
            entry = self._entry(uid)
            ended = len(entry.leases)
            if ended:
                readers = shown(lease.worker_id for lease in entry.leases.values())
                log.warning("%s: its publisher revoked the leases of %s", entry.picture(), readers)
            entry.leases.clear()
            self._release(entry, "it was deleted")
            if ended:
                entry.why += ", and its publisher revoked its leases"
            self._settle(entry)
            return ended

    def lease(self, uid: str, worker_id: str, ttl: int = 0) -> Lease:
        """A hold of `ttl` seconds, bounded; 0 takes the store's own. A worker has one lease on a version: asking again renews it."""
        with self._lock:
            check_name("worker_id", worker_id)
            entry = self._entry(uid)
            held = next((lease for lease in entry.leases.values() if lease.worker_id == worker_id), None)
            if held is None and entry.state == State.STAGING:
                raise Refusal("state", f"{entry.picture()} is STAGING: {shown(entry.picture().missing)} published no shard yet")
            if held is None and entry.state == State.RELEASING:
                raise Refusal(
                    "state", f"{entry.picture()} is RELEASING and takes no new lease: {entry.why}; take the latest version"
                )
            if held is None and len(entry.leases) >= MAX_LEASES:
                raise Refusal("full", f"{entry.picture()} has {MAX_LEASES} open leases; wait until some end")
            return self._hold(entry, uuid.uuid4().hex if held is None else held.lease_id, worker_id, ttl)

    def renew(self, uid: str, lease_id: str, worker_id: str, ttl: int = 0) -> Lease:
        """Let an open lease live on, RELEASING or not; a lease that has ended is unknown, and its reader must stop."""
        with self._lock:
            entry = self._entry(uid)
            held = entry.leases.get(lease_id)
            if held is None or held.worker_id != worker_id:
                raise Refusal("unknown", f"lease {lease_id!a} of {worker_id!a} on {entry.picture()} has ended: stop reading")
            return self._hold(entry, lease_id, worker_id, ttl)

    def release(self, uid: str, lease_id: str, worker_id: str) -> bool:
        """End a lease. False when this worker has none of that id, or the version is gone; ending twice does no harm."""
        with self._lock:
            entry = self._entries.get(uid)
            if entry is None:
                return False
            self._settle(entry)
            held = entry.leases.get(lease_id)
            if held is None or held.worker_id != worker_id:
                return False
            del entry.leases[lease_id]
            self._settle(entry)
            return True

    def register(self, worker_id: str, model_name: str, ttl: int = 0) -> int:
        """Note that a trainer or generator lives, for `ttl` seconds; returns until when, ms since the epoch by this machine's date."""
        with self._lock:
            if worker_id not in self._workers and len(self._workers) >= MAX_WORKERS:
                raise Refusal("full", f"{MAX_WORKERS} workers are registered; wait until some of them are silent for their ttl")
            seconds = self._bounded(ttl)
            self._workers[worker_id] = (model_name, self._clock() + seconds)
            return int((self._wall() + seconds) * 1000)

    def sweep(self) -> None:
        """Drop what time has ended; called every now and then, and needed by no answer."""
        with self._lock:
            for entry in list(self._entries.values()):
                self._settle(entry)
            now = self._clock()
            for worker_id in [worker_id for worker_id, (_, until) in self._workers.items() if until <= now]:
                model_name, _ = self._workers.pop(worker_id)
                log.info("worker %s of %s was silent for its ttl: forgotten", worker_id, model_name)

    # From here on: called with the lock held ---------------------------------------------------------------------------

    def _already(self, spec: VersionSpec) -> Entry | None:
        """The version that an earlier, equal request made; a refusal when the request differs."""
        uids = [spec.uid, self._keys.get((spec.model_name, spec.idempotency_key), "") if spec.idempotency_key else ""]
        for uid in uids:
            entry = self._entries.get(uid)
            if entry is None or not self._settle(entry):
                continue
            if entry.spec.content == spec.content and spec.uid in ("", entry.uid):
                return entry
            what = f"uid {spec.uid!a}" if uid == spec.uid else f"idempotency_key {spec.idempotency_key!a}"
            raise Refusal(
                "exists", f"{what} belongs to {entry.picture()} with other contents; use another one for another version"
            )
        return None

    def _entry(self, uid: str) -> Entry:
        entry = self._entries.get(uid)
        if entry is not None and self._settle(entry):
            return entry
        became = self._gone.get(uid)
        if became is None:
            raise Refusal("unknown", f"version {uid!a} is not known here: it never was, or the directory has restarted since")
        raise Refusal("unknown", f"version {uid!a} is gone: {became}")

    def _model(self, name: str) -> _Model:
        if name not in self._models and len(self._models) >= MAX_MODELS:
            idle = next((other for other, model in self._models.items() if not model.entries), None)
            if idle is None:
                raise Refusal(
                    "full", f"{MAX_MODELS} models have versions here already; delete those of a model that is not trained"
                )
            del self._models[idle]
        return self._models.setdefault(name, _Model())

    def _of(self, model_name: str) -> list[Entry]:
        """The living versions of a model, newest first."""
        model = self._models.get(model_name)
        living = [entry for entry in list(model.entries.values()) if self._settle(entry)] if model is not None else []
        return sorted(living, key=lambda entry: entry.rank, reverse=True)

    def _settle(self, entry: Entry) -> bool:
        """Judge an entry by the time; whether it is (still) there."""
        now = self._clock()
        for lease in [lease for lease in entry.leases.values() if lease.until <= now]:
            del entry.leases[lease.lease_id]
            log.warning("%s: the lease of %s was not renewed within its %d s", entry.picture(), lease.worker_id, lease.ttl)
        waited = now - entry.created
        if entry.state == State.STAGING and waited >= self._staging_seconds:
            missing = entry.picture().missing
            self._drop(
                entry,
                f"it was STAGING for {waited:.0f} s, and {shown(missing) or 'nobody'} published no shard",
                logging.WARNING,
            )
        elif entry.state == State.RELEASING and not entry.leases:
            self._drop(entry, entry.why)
        return entry.uid in self._entries

    def _settled_picture(self, entry: Entry) -> Version:
        picture = entry.picture()
        self._settle(entry)
        return picture

    def _drop(self, entry: Entry, why: str, level: int = logging.INFO) -> None:
        log.log(level, "%s is gone: %s", entry.picture(), why)
        del self._entries[entry.uid]
        del self._models[entry.spec.model_name].entries[entry.uid]
        self._keys.pop((entry.spec.model_name, entry.spec.idempotency_key), None)
        self._gone[entry.uid] = why
        while len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]

    def _release(self, entry: Entry, why: str) -> None:
        if entry.state != State.RELEASING:
            entry.state, entry.why = State.RELEASING, why

    def _make_ready(self, entry: Entry) -> None:
        entry.state = State.READY
        log.info("%s is READY with %d shards", entry.picture(), len(entry.shards))
        for other in superseded(entry, self._of(entry.spec.model_name), self._keep):
            self._release(other, f"version {entry.uid} (number {entry.number}) superseded it")
            self._settle(other)

    def _hold(self, entry: Entry, lease_id: str, worker_id: str, ttl: int) -> Lease:
        seconds = self._bounded(ttl)
        until_ms = int((self._wall() + seconds) * 1000)
        entry.leases[lease_id] = Lease(lease_id, entry.uid, worker_id, seconds, self._clock() + seconds, until_ms)
        return entry.leases[lease_id]

    def _bounded(self, ttl: int) -> int:
        return min(max(1, ttl or int(self._lease_seconds)), MAX_TTL_SECONDS)

    def _history(self, entry: Entry) -> str:
        if entry.state == State.RELEASING:
            return f"this: {entry.why}"
        return f"all {len(entry.spec.slots)} slots were published" if entry.spec.slots else "it was found in object storage"
