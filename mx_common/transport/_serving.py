"""Keeps a source's side of the transport moving without a progress thread of NIXL.

    pump = Pump("worker-7", agent.progress, active=leases_open); pump.stop()

Over tcp a reader only advances when the source looks at its sockets. NIXL's own thread does that by taking a whole core for
ever; this one looks often while somebody reads and a few times a second otherwise. Somebody reads while `active()` says so,
and for a second after a look that had work to do (peers that read without a lease). Invariant: it ends with `stop`, and no
error of a look ends it before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from mx_common.errors import MxError

__all__ = ["Pump"]

log = logging.getLogger(__name__)

_BUSY_PAUSE, _IDLE_PAUSE = 100e-6, 0.15
_WORK_SECONDS = 1e-3  # cpu time of a look that had something to do; an idle one takes some ten microseconds
_BUSY_AFTER_WORK = 1.0


class Pump:
    """A daemon thread that calls `look` again and again."""

    def __init__(self, name: str, look: Callable[[], None], active: Callable[[], bool]) -> None:
        self._look, self._active = look, active
        self._stop, self._wake = threading.Event(), threading.Event()
        self._busy_until = 0.0
        self._troubled = False
        self._thread = threading.Thread(target=self._run, name=f"mx-serve-{name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended; not to be called from it."""
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def nudge(self) -> None:
        """Look now: a reader is about to connect, and would wait for the next look otherwise."""
        self._wake.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                used = time.thread_time()
                self._look()
                if time.thread_time() - used > _WORK_SECONDS:
                    self._busy_until = time.monotonic() + _BUSY_AFTER_WORK
                busy = self._active() or time.monotonic() < self._busy_until
                self._troubled = False
            except Exception as error:  # `active` is the caller's, and readers must go on whatever it does
                busy = isinstance(error, MxError) is False
                if not self._troubled:
                    log.warning("serving readers: %s: %s", type(error).__name__, error)
                self._troubled = True
            # Event.wait costs a lock and a timer a round, too much at this pace
            if busy:
                time.sleep(_BUSY_PAUSE)
            else:
                self._wake.wait(_IDLE_PAUSE)
                self._wake.clear()
