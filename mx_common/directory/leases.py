"""Read leases: who reads this worker's memory now, so that it is released only when nobody does.

    leases = Leases(ttl=60)
    lease_id = leases.grant()
    leases.wait_idle(timeout=70)           # True once every lease was released or has expired

A reader that dies never releases, so a lease lives `ttl` seconds unless renewed: memory is held for a bounded time after its
reader is gone. Invariant: while `open_count()` is above 0 somebody may be reading.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable

from mx_common.errors import ConfigError

__all__ = ["Leases"]

MAX_WAIT_SLICE_SECONDS = 0.5


class Leases:
    """Open leases by id; every method is safe to call from several threads.

    `ttl`: seconds a lease lives without renewal, at least 1 (readers are told whole seconds). `clock`: monotonic seconds, there
    to be replaced in tests. `granted` is told of each new lease, at once.
    """

    def __init__(
        self, ttl: float, clock: Callable[[], float] = time.monotonic, granted: Callable[[], None] = lambda: None
    ) -> None:
        if not 1 <= ttl < float("inf"):
            raise ConfigError(f"a lease of {ttl:g} s is not possible; MX_LEASE_SECONDS has to be at least 1 and finite")
        self.ttl = ttl
        self._clock = clock
        self._granted = granted
        self._ends: dict[str, float] = {}
        self._granting = True
        self._changed = threading.Condition()

    def grant(self, ttl: float | None = None) -> str | None:
        """A new lease's id, or None when `close` was called: the memory is about to go.

        `ttl`: seconds of this lease before its first renewal, for readers that never renew.
        """
        with self._changed:
            if not self._granting:
                return None
            lease_id = uuid.uuid4().hex
            self._ends[lease_id] = self._clock() + (ttl or self.ttl)
        self._granted()
        return lease_id

    def renew(self, lease_id: str) -> bool:
        """Let an open lease live `ttl` seconds from now. False when it is not open (any more): the reader must stop."""
        with self._changed:
            self._expire()
            if lease_id not in self._ends:
                return False
            self._ends[lease_id] = self._clock() + self.ttl
            return True

    def release(self, lease_id: str) -> bool:
        """End a lease. False when it was not open; ending twice does no harm."""
        with self._changed:
            self._expire()
            known = self._ends.pop(lease_id, None) is not None
            self._changed.notify_all()
            return known

    def open_count(self) -> int:
        """How many leases are open now; those that ran out do not count."""
        with self._changed:
            self._expire()
            return len(self._ends)

    def close(self) -> None:
        """Grant no more leases; those that are open can still be renewed and released."""
        with self._changed:
            self._granting = False

    def revoke(self) -> None:
        """End every open lease at once: readers learn it when they renew or check, and may not use what they read."""
        with self._changed:
            self._ends.clear()
            self._changed.notify_all()

    def reopen(self) -> None:
        """Grant leases again."""
        with self._changed:
            self._granting = True

    def wait_idle(self, timeout: float) -> bool:
        """Whether no lease was open at some moment within `timeout` seconds. `close` first, or a new one may follow."""
        deadline = self._clock() + timeout
        with self._changed:
            while True:
                self._expire()
                if not self._ends:
                    return True
                now = self._clock()
                if now >= deadline:
                    return False
                next_change = min(deadline, *self._ends.values()) - now
                # expiry wakes nobody, and a replaced clock runs at its own pace: look again now and then
                self._changed.wait(min(max(next_change, 0.001), MAX_WAIT_SLICE_SECONDS))

    def _expire(self) -> None:
        now = self._clock()
        for lease_id in [lease_id for lease_id, end in self._ends.items() if end <= now]:
            del self._ends[lease_id]
