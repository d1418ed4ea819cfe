"""Tells the directory how far a load or a refit is, about once a second, for people who watch.

    reporter = Reporter("10.0.0.5:8001")
    with reporter.doing(activity, stages) as doing:
        doing.planned(total_bytes, sources)
        transport.read(..., progress=doing.reading())

A daemon thread reports; what ends before its first report is due costs a thread that never woke. Invariant: reporting neither delays a
transfer nor fails it, and a server that does not know the call is asked once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mx_common._timed import Stages
from mx_common.directory.activities import MAX_SOURCES, REPORT_SECONDS, Activity
from mx_common.directory.activity_client import ActivityClient
from mx_common.errors import DirectoryError
from mx_common.floor import gbps

__all__ = ["Doing", "Reporter"]

log = logging.getLogger(__name__)

ANSWER_SECONDS = 1.0
RATE_REPORTS = 4  # over which a rate is taken


class Doing:
    """How far one load or refit is. The threads that transfer write it; the reporter's reads it."""

    def __init__(self, activity: Activity, stages: Stages, clock: Callable[[], float] = time.monotonic) -> None:
        self._activity, self._stages, self._clock = activity, stages, clock
        self._done = 0
        self._lock = threading.Lock()
        self._began = clock()
        self._seen: deque[tuple[float, int]] = deque([(self._began, 0)], maxlen=RATE_REPORTS)

    def of_version(self, number: int, uid: str) -> None:
        """Which version it is that is read."""
        self._activity = replace(self._activity, version=number, version_id=uid)

    def planned(self, total: int, sources: Sequence[str]) -> None:
        """`total`: bytes that all reads together will bring."""
        self._activity = replace(self._activity, bytes_total=total, sources=tuple(sources[:MAX_SOURCES]))

    def reading(self) -> Callable[[int, int], None]:
        """The progress hook of one read; several may go on at once."""
        before = 0

        def progress(done: int, total: int) -> None:
            nonlocal before
            with self._lock:
                self._done += done - before
            before = done

        return progress

    def now(self) -> Activity:
        """The activity at this moment, its rate over the last calls of this."""
        at, done = self._clock(), self._done
        then, had = self._seen[0]
        self._seen.append((at, done))
        return replace(
            self._activity,
            stage=self._stages.current,
            bytes_done=done,
            gbps=gbps(done - had, at - then) or 0.0,
            seconds=at - self._began,
        )


class Reporter:
    """For all loads or refits of one rank, one after the other. `pause`: seconds before the first report of each."""

    def __init__(self, address: str, *, pause: float = REPORT_SECONDS) -> None:
        self._address, self._pause = address, pause
        self._served = True

    @contextlib.contextmanager
    def doing(self, activity: Activity, stages: Stages) -> Iterator[Doing]:
        """Report `activity`, as it advances, while the block runs. `stages`: which one of it is going on."""
        doing, over = Doing(activity, stages), threading.Event()
        if self._served:
            thread = threading.Thread(target=self._tell, args=(doing, over), name="mx-activity", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be started: then nobody watches
                thread.start()
        try:
            yield doing
        finally:
            over.set()

    def _tell(self, doing: Doing, over: threading.Event) -> None:
        if over.wait(self._pause):
            return
        try:
            with ActivityClient(self._address, timeout=ANSWER_SECONDS) as client:
                self._report(client, doing, over)
        except Exception:  # whatever goes wrong here, it is nothing to the transfer
            log.debug("an activity is not reported to %s any more", self._address, exc_info=True)

    def _report(self, client: ActivityClient, doing: Doing, over: threading.Event) -> None:
        while not over.is_set():
            try:
                pause = client.report(doing.now())
            except DirectoryError as error:
                log.debug("an activity was not reported: %s", error)
                pause = self._pause
            if pause is None:
                self._served = False
                return
            over.wait(max(pause, self._pause))
        client.end(doing.now())
