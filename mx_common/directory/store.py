"""Where a directory keeps its records, and when it stops believing a source that fell silent.

    store = MemoryStore(stale_seconds=90, remove_seconds=600)
    store.put(record)                                   # registers, or replaces
    store.beat("0123456789abcdef", "worker", Heartbeat(READY, 0.25))

A source that says nothing for `stale_seconds` is STALE in every answer from then on, whether or not `sweep` ran; after
`remove_seconds` it is gone. Silence is measured by this process's monotonic clock, so neither a client's clock nor a step of
this machine's date changes it. Invariant: a heartbeat never rewrites what was registered.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from mx_common.directory.activities import Activities, MemoryActivities
from mx_common.directory.records import STALE, Heartbeat, Query, Record, select
from mx_common.errors import ConfigError

__all__ = ["MemoryStore", "Store", "check_ages"]

log = logging.getLogger(__name__)


class Store(Protocol):
    """What a directory server needs. Every method is safe to call from several threads.

    A store that lies elsewhere raises `DirectoryUnavailable` while it cannot be reached.
    """

    blocking: bool
    """Whether calls wait for the network, so that a server runs them outside its event loop."""

    @property
    def activities(self) -> Activities:
        """The loads and refits that are under way."""

    def put(self, record: Record) -> Record:
        """Register a worker or replace its record; returns it as stored, `updated_at` stamped by the store."""

    def beat(self, mx_source_id: str, worker_id: str, heartbeat: Heartbeat) -> bool:
        """Take a heartbeat; False when the worker is not known (it must register again)."""

    def get(self, mx_source_id: str, worker_id: str) -> Record | None:
        """One record, or None."""

    def list(self, query: Query) -> list[Record]:
        """The records that `query` selects; their serialized `identity` and `worker` may be left out (empty)."""

    def sweep(self) -> None:
        """Forget the sources that were silent for too long; called every now and then."""

    def now_ms(self) -> int:
        """The clock that stamps `updated_at`, ms since the epoch."""


def check_ages(stale_seconds: float, remove_seconds: float) -> None:
    """Raise `ConfigError` unless a source becomes STALE before it is removed."""
    if not 0 < stale_seconds <= remove_seconds:
        raise ConfigError(
            f"a source must become STALE before it is removed: MX_STALE_SECONDS={stale_seconds:g} has to be above 0 and at "
            f"most MX_REMOVE_SECONDS={remove_seconds:g}"
        )


@dataclass
class _Slot:
    record: Record
    heard: float


class MemoryStore:
    """A store in this process's memory. Empty after a restart: the sources' heartbeats fill it again.

    `clock` is monotonic seconds, `wall` seconds since the epoch; both are there to be replaced in tests.
    """

    blocking = False

    def __init__(
        self,
        *,
        stale_seconds: float,
        remove_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        check_ages(stale_seconds, remove_seconds)
        self.stale_seconds = stale_seconds
        self.remove_seconds = remove_seconds
        self._clock = clock
        self._wall = wall
        self.activities = MemoryActivities(clock=clock)
        self._slots: dict[tuple[str, str], _Slot] = {}
        self._lock = threading.Lock()

    def now_ms(self) -> int:
        return int(self._wall() * 1000)

    def put(self, record: Record) -> Record:
        stored = replace(record, updated_at=self.now_ms())
        with self._lock:
            self._slots[record.key] = _Slot(stored, self._clock())
        return stored

    def beat(self, mx_source_id: str, worker_id: str, heartbeat: Heartbeat) -> bool:
        with self._lock:
            slot = self._settled((mx_source_id, worker_id))
            if slot is None:
                return False
            slot.record = replace(
                slot.record,
                status=heartbeat.status,
                source_load=heartbeat.source_load,
                reads_in_flight=heartbeat.reads_in_flight,
                updated_at=self.now_ms(),
            )
            slot.heard = self._clock()
            return True

    def get(self, mx_source_id: str, worker_id: str) -> Record | None:
        with self._lock:
            slot = self._settled((mx_source_id, worker_id))
            return None if slot is None else slot.record

    def list(self, query: Query) -> list[Record]:
        with self._lock:
            settled = [self._settled(key) for key in list(self._slots)]
        return select((slot.record for slot in settled if slot is not None), query)

    def sweep(self) -> None:
        with self._lock:
            for key in list(self._slots):
                self._settled(key)

    def _settled(self, key: tuple[str, str]) -> _Slot | None:
        """The slot of `key` after its silence was judged; None when there is none, or none any more."""
        slot = self._slots.get(key)
        if slot is None:
            return None
        silent = self._clock() - slot.heard
        if silent >= self.remove_seconds:
            del self._slots[key]
            log.info("source %s worker %s was silent for %.0f s: forgotten", *key, silent)
            return None
        if silent >= self.stale_seconds and slot.record.status != STALE:
            # updated_at stays: it says when the source was last heard of
            slot.record = replace(slot.record, status=STALE)
            log.warning("source %s worker %s was silent for %.0f s: STALE", *key, silent)
        return slot
