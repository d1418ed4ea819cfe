"""The thread that keeps a source's side moving: rare looks while nobody reads, and one at once when a reader is announced."""

from __future__ import annotations

import threading
import time

from mx_common.directory import Leases
from mx_common.transport import _serving
from mx_common.transport._serving import Pump

LONG = 600.0


def test_a_reader_that_is_announced_does_not_wait_for_the_next_look(monkeypatch):
    monkeypatch.setattr(_serving, "_IDLE_PAUSE", LONG)
    looks = threading.Semaphore(0)
    pump = Pump("w", looks.release, active=lambda: False)
    assert looks.acquire(timeout=10), "the first look"
    while looks.acquire(timeout=0.2):  # a look that took long has others follow it
        pass
    leases = Leases(60, granted=pump.nudge)
    leases.grant()
    assert looks.acquire(timeout=10), "the lease was granted, and nobody looked"
    started = time.monotonic()
    pump.stop()
    assert time.monotonic() - started < LONG / 2, "a pause does not hold up the end"


def test_a_reader_that_is_not_announced_is_found_by_the_next_look():
    looks = threading.Semaphore(0)
    pump = Pump("w", looks.release, active=lambda: False)
    assert all(looks.acquire(timeout=10) for _ in range(3))
    pump.stop()
