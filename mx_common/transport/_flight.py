"""The wait loop of one read: windows of bounded bytes, a deadline, and a check that something still moves.

    result = Flight(agent, peer, reads, timeout=300, stall_timeout=30, progress=None).run()

Each window is one NIXL transfer; a few are in flight. Windows start at 1 MiB and grow while they complete fast, so that a
fast link has large ones and progress on a slow one is seen often: NIXL tells only whole transfers. Invariant: `run` returns
after the last byte, or raises with every unfinished window released and `moving` telling whether there were any.
"""

from __future__ import annotations

import time

from mx_common.errors import TransferError, TransferTimeout
from mx_common.transport._agent import Agent, Posted
from mx_common.transport._columns import Reads
from mx_common.transport._evidence import Counters, carrier
from mx_common.transport._protocol import Progress, WireResult

__all__ = ["Flight"]

_IN_FLIGHT = 3
_MIN_WINDOW, _MAX_WINDOW = 1 << 20, 256 << 20
_FAST, _SLOW = 0.1, 1.0  # seconds a window may take to grow the next ones, or to shrink them

# On tcp the checks themselves move the bytes, so they follow each other while windows complete often; on a slow link, or a silent one,
# a pause costs nothing and leaves the core to others.
_PAUSE, _PAUSE_AFTER = 200e-6, 0.1


class Flight:
    """One read of one peer. Times in seconds."""

    def __init__(
        self, agent: Agent, peer: str, reads: Reads, *, timeout: float, stall_timeout: float, progress: Progress | None
    ) -> None:
        self._agent, self._peer, self._asked = agent, peer, reads
        self._timeout, self._stall_timeout, self._progress = timeout, stall_timeout, progress
        self._total = reads.total_bytes
        self._done = 0
        self._flying: list[Posted] = []
        self._window = _MIN_WINDOW
        self.moving = False

    def run(self) -> WireResult:
        """Raises TransferTimeout, SourceLost, TransferError."""
        reads = self._accepted()
        before = Counters.now()
        offset = descriptors = at_once = 0
        self._start = self._moved = time.monotonic()
        news = False
        try:
            while True:
                while offset < self._total and len(self._flying) < _IN_FLIGHT:
                    part = reads.window(offset, min(offset + self._window, self._total))
                    self._post(part)
                    at_once += part.total_bytes if self._flying[-1].done else 0
                    offset += part.total_bytes
                    descriptors += len(part)
                if news and self._progress is not None:  # only now: the wire is busy while it runs
                    self._progress(self._done, self._total)
                if self._done >= self._total:
                    break
                news = self._collect()
                self._check_time()
                if not news:
                    self._wait()
        except BaseException:
            self._abort()
            raise
        seconds = self._moved - self._start
        return WireResult(self._total, seconds, descriptors, carrier(before, Counters.now(), self._total, at_once=at_once))

    def _accepted(self) -> Reads:
        """The reads joined, or as they were asked for when a joined one spans two registrations of the peer."""
        joined = self._asked.coalesced()
        try:
            self._agent.release(self._agent.prepare(self._peer, joined))
        except TransferError:
            if len(joined) == len(self._asked):
                raise
            joined = self._asked
            self._agent.release(self._agent.prepare(self._peer, joined))
        return joined

    def _post(self, part: Reads) -> None:
        posted = self._agent.prepare(self._peer, part)
        self._flying.append(posted)
        self._agent.post(posted, self._peer)

    def _collect(self) -> bool:
        """Take completed windows off the list; whether there was one."""
        complete = [posted for posted in self._flying if self._agent.poll(posted, self._peer)]
        if not complete:
            return False
        self._moved = time.monotonic()
        for posted in complete:
            self._flying.remove(posted)
            self._agent.release(posted)
            self._done += posted.bytes
            self._resize(self._moved - posted.since)
        return True

    def _resize(self, seconds: float) -> None:
        if seconds < _FAST:
            self._window = min(self._window * 2, _MAX_WINDOW)
        elif seconds > _SLOW:
            self._window = max(self._window // 2, _MIN_WINDOW)

    def _wait(self) -> None:
        if time.monotonic() - self._moved >= _PAUSE_AFTER:
            time.sleep(_PAUSE)

    def _check_time(self) -> None:
        now = time.monotonic()
        silent, whole = now - self._moved, now - self._start
        if self._done >= self._total or (silent < self._stall_timeout and whole < self._timeout):
            return
        where = f"{self._agent.name}: reading from {self._peer!r}: {self._done} of {self._total} bytes after {whole:.1f} s"
        if silent >= self._stall_timeout:
            raise TransferTimeout(
                f"{where}, and no progress for {silent:.1f} s; the source is stopped, hung or cut off. Take another source, or "
                f"raise MX_TRANSFER_STALL_TIMEOUT (now {self._stall_timeout:g} s) if its link is that slow"
            )
        raise TransferTimeout(
            f"{where}, and {self._timeout:g} s is all it may take; raise MX_TRANSFER_TIMEOUT if the link is that slow, or look "
            "for what slows it"
        )

    def _abort(self) -> None:
        unfinished = [posted for posted in self._flying if not posted.done]
        self.moving = bool(unfinished)
        for posted in self._flying:
            self._agent.release(posted)
        self._flying.clear()
