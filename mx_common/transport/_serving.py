"""Keeps a source's side of the transport moving without a progress thread of NIXL.

    pump = Pump("worker-7", agent.progress, active=leases_open); pump.stop()

Over tcp a reader only advances when the source looks at its sockets. NIXL's own thread does that by taking a whole core for
ever; this one looks often while somebody reads and once in three seconds otherwise. Somebody reads while `active()` says so,
for a second after a `nudge`, and while looks go on finding work (peers that read without a lease). Looks that find nothing
meanwhile come less often: a reader on the same host needs none of them, and needs the core. Invariant: it ends with `stop`, and
no error of a look ends it before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from mx_common.errors import MxError

__all__ = ["Pump"]

log = logging.getLogger(__name__)

# between looks that find work; the most between others while somebody reads; while nobody does
_BUSY_PAUSE, _SLACK_PAUSE, _IDLE_PAUSE = 100e-6, 2e-3, 3.0
# What a look costs tells whether it found work. NIXL does not: a look moves at least a socket's worth of bytes or does nothing in some
# ten microseconds of cpu time, but for the first after a pause, which finds cold caches and may take a millisecond for nothing.
_WORK_SECONDS = 100e-6
_TRIAL_SECONDS, _STRETCH_SECONDS = 0.02, 1.0
_AT_WORK = 0.125
_ENOUGH_LOOKS = (
    24  # to judge by: a machine that is slow to wake holds three looks in a trial, and one of them is dear by chance
)


class Pace:
    """Whether somebody reads, judged by the cpu time of looks. After a dear look others follow soon for a while: a short trial, then
    stretches, each as long as one look in eight finds work. `pause`: seconds until the next look, if one is to follow; doubled by each look
    that finds nothing."""

    def __init__(self) -> None:
        self.pause = _BUSY_PAUSE
        self._until = 0.0
        self._looks = self._at_work = 0

    def expect(self, now: float) -> None:
        """Somebody said that there will be work: a stretch begins."""
        self.pause = _BUSY_PAUSE
        self._follow(now + _STRETCH_SECONDS)

    def goes_on(self, used: float, now: float) -> bool:
        """Whether the next look should follow soon, after one that ended at `now` and took `used` seconds of cpu time."""
        worked = used > _WORK_SECONDS
        self.pause = _BUSY_PAUSE if worked else min(2 * self.pause, _SLACK_PAUSE)
        if not self._until:
            if worked:
                self._follow(now + _TRIAL_SECONDS)
            return worked
        self._looks += 1
        self._at_work += worked
        if now >= self._until and self._looks >= _ENOUGH_LOOKS:
            self._follow(now + _STRETCH_SECONDS if self._at_work >= _AT_WORK * self._looks else 0.0)
        return self._until > 0

    def _follow(self, until: float) -> None:
        self._until = until
        self._looks = self._at_work = 0


class Pump:
    """A daemon thread that calls `look` again and again."""

    def __init__(self, name: str, look: Callable[[], None], active: Callable[[], bool]) -> None:
        self._look, self._active = look, active
        self._stop, self._wake = threading.Event(), threading.Event()
        self._pace = Pace()
        self._nudged = self._troubled = False
        self._thread = threading.Thread(target=self._run, name=f"mx-serve-{name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended; not to be called from it."""
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def nudge(self) -> None:
        """Look now and for a second: a reader is about to connect, and would wait for the next look otherwise."""
        self._nudged = True
        self._wake.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                used = time.thread_time()
                self._look()
                now = time.monotonic()
                if self._nudged:
                    self._nudged = False
                    self._pace.expect(now)
                found_work = self._pace.goes_on(time.thread_time() - used, now)
                busy = self._active() or found_work
                self._troubled = False
            except Exception as error:  # `active` is the caller's, and readers must go on whatever it does
                busy = isinstance(error, MxError) is False
                if not self._troubled:
                    log.warning("serving readers: %s: %s", type(error).__name__, error)
                self._troubled = True
            # Event.wait costs a lock and a timer a round, too much at this pace
            if busy:
                time.sleep(self._pace.pause)
            else:
                self._wake.wait(_IDLE_PAUSE)
                self._wake.clear()
