"""Loads and refits that are under way, as a directory remembers them for people who watch: who reads what from whom, how far, how fast.

    activities = MemoryActivities()
    pause = activities.report(activity.to_proto())      # seconds until the next report is wanted
    activities.end(activity.activity_id)

What falls silent is forgotten after `LIVES` times the pause that it was told: nothing has to be cleaned up after a kill. The pause grows
with the number of activities, so that a fleet that loads at once does not keep the directory from its work. Invariant: memory is bounded,
by `MAX_ACTIVITIES` of `MAX_ACTIVITY_BYTES` each; what comes on top is not remembered.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from mx_common.errors import ConfigError
from mx_common.wire import activity as wire

__all__ = [
    "LIVES",
    "MAX_ACTIVITIES",
    "MAX_BYTES",
    "MAX_GBPS",
    "REPORT_SECONDS",
    "Activities",
    "Activity",
    "MemoryActivities",
    "pause_for",
]

REPORT_SECONDS = 1.0
REPORTS_PER_SECOND = 500  # of all activities together
LIVES = 5
MAX_ACTIVITIES = 16384
MAX_ACTIVITY_BYTES = 4096
MAX_SOURCES = 16
# more than one rank can hold or move on any machine: a figure above is an error, and would spoil the sums of all others
MAX_BYTES = 1 << 50
MAX_GBPS = 1e6


@dataclass(frozen=True)
class Activity:
    """One load or refit of one rank, at one moment.

    `activity_id` is its own, `worker_id` that of the target or receiver. `path` and `stage`: as in records ("load", "wire"). `version`: of
    a refit; None for a load, and while a receiver waits for the newest. `sources`: workers, or slots of a trainer, that it reads from; the
    first 16. `bytes_total` is 0 until it is planned; `gbps`: Gbit/s over the last few seconds; `seconds`: since it began. Raises
    ConfigError for one that means nothing.
    """

    activity_id: str
    worker_id: str
    model_name: str
    path: str
    host: str = ""
    rank: int = 0
    world: int = 1
    engine: str = ""
    version: int | None = None
    version_id: str = ""
    sources: tuple[str, ...] = ()
    stage: str = ""
    bytes_done: int = 0
    bytes_total: int = 0
    gbps: float = 0.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("activity_id", "worker_id", "model_name", "path"):
            if not getattr(self, name):
                raise ConfigError(f"{name} of an activity is empty; it has to name something")
        for name in ("gbps", "seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} of an activity is {getattr(self, name)}; it has to be a number, 0 or more")
        for name, most in (("bytes_done", MAX_BYTES), ("bytes_total", MAX_BYTES), ("gbps", MAX_GBPS)):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} of an activity is {getattr(self, name):g}; it has to be between 0 and {most:g}")
        if len(self.sources) > MAX_SOURCES:
            raise ConfigError(f"an activity names {len(self.sources)} sources; name the first {MAX_SOURCES}")

    @property
    def is_load(self) -> bool:
        """Whether it reads from a source, and not from a trainer."""
        return self.path == "load"

    def to_proto(self) -> wire.Activity:
        """Its message."""
        return wire.Activity(**vars(self))

    @classmethod
    def from_proto(cls, message: wire.Activity) -> Activity:
        """The activity in `message`. Raises ConfigError for one that means nothing, or that nobody could keep."""
        if message.ByteSize() > MAX_ACTIVITY_BYTES:
            raise ConfigError(f"an activity of {message.ByteSize()} bytes is too large; it may have {MAX_ACTIVITY_BYTES}")
        values: dict[str, Any] = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
        if not message.HasField("version"):
            values["version"] = None
        return cls(**{**values, "sources": tuple(message.sources)})


class Activities(Protocol):
    """What a directory server needs to remember them, as messages: it hands them out, and never looks inside. Safe to call from several
    threads; may raise as its `Store` does."""

    def report(self, activity: wire.Activity) -> float:
        """Remember it, in place of what was reported of it before. Returns the seconds until the next report is wanted."""

    def end(self, activity_id: str) -> None:
        """Forget it."""

    def all(self) -> list[wire.Activity]:
        """Those that are not silent."""


def pause_for(count: int) -> float:
    """Seconds between two reports of an activity, when there are `count`."""
    return max(REPORT_SECONDS, count / REPORTS_PER_SECOND)


class MemoryActivities:
    """In this process's memory. `clock`: monotonic seconds, there to be replaced in tests."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # oldest report first
        self._until: dict[str, tuple[float, wire.Activity]] = {}
        self._lock = threading.Lock()

    def report(self, activity: wire.Activity) -> float:
        with self._lock:
            known = self._until.pop(activity.activity_id, None) is not None
            now = self._clock()
            while self._until and next(iter(self._until.values()))[0] <= now:
                del self._until[next(iter(self._until))]
            pause = pause_for(len(self._until) + known)
            if len(self._until) < MAX_ACTIVITIES:
                self._until[activity.activity_id] = (now + LIVES * pause, activity)
            return pause

    def end(self, activity_id: str) -> None:
        with self._lock:
            self._until.pop(activity_id, None)

    def all(self) -> list[wire.Activity]:
        with self._lock:
            now = self._clock()
            # not only from the oldest on: one that was told a longer pause may be before others that are silent
            self._until = {activity_id: kept for activity_id, kept in self._until.items() if kept[0] > now}
            return [activity for _, activity in self._until.values()]
