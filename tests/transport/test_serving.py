"""The thread that keeps a source's side moving: rare looks while nobody reads, and one at once when a reader is announced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mx_common.directory import Leases
from mx_common.transport import _serving
from mx_common.transport._serving import Pace, Pump

LONG = 600.0
COLD, IDLE, WORK = 1.2e-3, 5e-6, 200e-6  # seconds of cpu time of a look
PAUSE, SLACK, AT_ONCE = _serving._IDLE_PAUSE, _serving._SLACK_PAUSE, _serving._BUSY_PAUSE  # seconds until the next one


def looks_of(pace: Pace, seconds: float, cost: Callable[[int, bool], float], start: float = 0.0) -> int:
    """How many looks `seconds` hold at the pace asked for; `cost` of the n-th, and whether it follows a pause."""
    now, looks, soon = start, 0, False
    while now < start + seconds:
        soon = pace.goes_on(cost(looks, not soon), now)
        looks += 1
        now += pace.pause if soon else PAUSE
    return looks


def test_looks_that_are_dear_only_after_a_pause_stay_rare():
    assert looks_of(Pace(), 30, lambda n, paused: COLD if paused else IDLE) < 0.05 * 30 / AT_ONCE


def test_a_dear_look_now_and_then_does_not_keep_a_core_busy():
    looks = looks_of(Pace(), 30, lambda n, paused: COLD if paused or n % 40 == 0 else IDLE)
    assert looks < 0.05 * 30 / AT_ONCE


def test_while_looks_find_work_they_follow_each_other_and_no_longer():
    pace = Pace()
    assert looks_of(pace, 10, lambda n, paused: WORK) > 0.9 * 10 / AT_ONCE
    assert looks_of(pace, 10, lambda n, paused: IDLE, start=10) < 1.5 / SLACK


def test_work_in_one_look_of_four_is_somebody_who_reads():
    assert looks_of(Pace(), 10, lambda n, paused: WORK if n < 10 or n % 4 == 0 else IDLE) > 0.9 * 10 / (8 * AT_ONCE)


def test_looks_that_find_nothing_come_less_often_until_one_finds_work():
    pace = Pace()
    pace.expect(0.0)
    pauses = []
    for number in range(8):
        assert pace.goes_on(IDLE if number < 7 else WORK, number * 1e-3)
        pauses.append(pace.pause)
    assert pauses == [*(AT_ONCE * 2**n for n in range(1, 5)), SLACK, SLACK, SLACK, AT_ONCE]


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


def test_a_reader_that_is_announced_has_a_second_of_looks_and_leaves_the_core_to_others():
    pace = Pace()
    pace.expect(0.0)
    assert 0.9 / SLACK < looks_of(pace, 10, lambda n, paused: IDLE) < 1.5 / SLACK


def test_a_reader_that_is_not_announced_is_found_by_the_next_look(monkeypatch):
    monkeypatch.setattr(_serving, "_IDLE_PAUSE", 0.1)
    looks = threading.Semaphore(0)
    pump = Pump("w", looks.release, active=lambda: False)
    assert all(looks.acquire(timeout=10) for _ in range(3))
    pump.stop()
