"""Carries an engine's load from the process that has the queue to the workers of the same host that heartbeat.

    ServingLoad(instance_id, 0).publish(0.4, ready=True)        # in the API server, every few seconds
    ServingLoad(instance_id, 0).read()                          # in a worker: Reading(load=0.4, ready=True, ...) or None

One small file per engine and writer in `runtime_dir()/serving`, replaced atomically. Invariant: a reading comes from a
process of this user and this boot that still runs and published within `MAX_AGE_SECONDS` by the monotonic clock, so neither a
clock that is an hour off nor a recycled pid can make an old load look current; and nothing here raises into an engine.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from mx_common._host_files import private_folder
from mx_common._once import warn_once
from mx_common._process import started
from mx_common.errors import ConfigError

__all__ = ["MAX_AGE_SECONDS", "Reading", "ServingLoad"]

log = logging.getLogger(__name__)

MAX_AGE_SECONDS = 60.0


@dataclass(frozen=True)
class Reading:
    """What an engine said last: its load in [0, 1], whether it can take requests, and how long ago, in seconds."""

    load: float
    ready: bool
    age: float


@dataclass(frozen=True)
class ServingLoad:
    """The channel of one engine: the instance's id, and the engine's index where an instance runs several."""

    instance: str
    engine_index: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.instance, str) or not self.instance:
            raise ConfigError(f"ServingLoad.instance={self.instance!r}: give the id the engine's processes share")
        if isinstance(self.engine_index, bool) or not isinstance(self.engine_index, int) or self.engine_index < 0:
            raise ConfigError(f"ServingLoad.engine_index={self.engine_index!r}: give a whole number from 0")

    def publish(self, load: float, ready: bool) -> bool:
        """Replace what this process said before; False, and one warning, when that is not possible or `load` is not finite."""
        if not math.isfinite(load):
            return False
        entry = {
            "instance": self.instance,
            "engine_index": self.engine_index,
            "load": min(max(float(load), 0.0), 1.0),
            "ready": bool(ready),
            "pid": os.getpid(),
            "started": started(os.getpid()),
            "boot": _boot_id(),
            "at": time.monotonic(),
        }
        try:
            path = private_folder("serving", make=True) / self._file_name(os.getpid())
            scratch = path.with_suffix(f".{threading.get_ident()}.new")
            scratch.write_text(json.dumps(entry), "ascii")
            scratch.replace(path)
        except (OSError, ConfigError) as error:
            warn_once(log, ("publish", str(error)), "the serving load is not published: %s", error)
            return False
        return True

    def read(self, max_age: float = MAX_AGE_SECONDS) -> Reading | None:
        """The busiest of the live writers' readings, ready if any of them is; None when there is none."""
        try:
            files = sorted(private_folder("serving", make=False).glob(f"{self._stem}.*.json"))
        except FileNotFoundError:
            return None
        except (OSError, ConfigError) as error:
            warn_once(log, ("read", str(error)), "the serving load is not read: %s", error)
            return None
        readings = [reading for reading in map(_read_entry, files) if reading is not None and reading.age <= max_age]
        if not readings:
            return None
        load = max(reading.load for reading in readings)
        return Reading(load, any(reading.ready for reading in readings), min(reading.age for reading in readings))

    def close(self) -> None:
        """Forget what this process published."""
        with contextlib.suppress(OSError, ConfigError):
            (private_folder("serving", make=False) / self._file_name(os.getpid())).unlink()

    @functools.cached_property
    def _stem(self) -> str:
        # the digest keeps two instances apart whose ids are the same once only file-name characters are left
        digest = hashlib.sha256(self.instance.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return f"{re.sub(r'[^A-Za-z0-9-]', '_', self.instance)[:40]}-{digest}-{self.engine_index}"

    def _file_name(self, pid: int) -> str:
        return f"{self._stem}.{pid}.json"


def _read_entry(path: Path) -> Reading | None:
    """The reading in one file; None, and the file removed, when its writer is gone."""
    try:
        entry = json.loads(path.read_text("ascii"))
        pid, load, ready = int(entry["pid"]), float(entry["load"]), entry["ready"] is True
        age = time.monotonic() - float(entry["at"])
        alive = entry["boot"] == _boot_id() and entry["started"] == started(pid) != ""
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    if not alive:
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    return Reading(load, ready, age) if 0.0 <= load <= 1.0 and age >= 0.0 else None


@functools.cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""
