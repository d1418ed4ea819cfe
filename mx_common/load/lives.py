"""Notes of the workers that serve on this host, for other processes of it.

    lives.remember(Life(worker_id, ...)) # a source, when the directory has registered it
    lives.gone()                         # a target: ids of workers of this host that have ended
    lives.retire(instance)               # an engine's front end, as it ends: its workers are STALE from now on

After a crash the directory lists a dead worker as READY until its heartbeats are missed; a process of the same host knows better. And an
engine that is told to end may kill its workers before they can say anything: whoever told it says it for them.
Invariant: an id is reported gone only when its process, by id and start time, does not exist. No note, no opinion.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from mx_common._host_files import private_folder
from mx_common._process import started
from mx_common.directory.client import DirectoryClient
from mx_common.errors import ConfigError, MxError
from mx_common.wire import p2p

__all__ = ["Life", "forget", "gone", "remember", "retire"]

FOLDER = "workers"
FAREWELL_SECONDS = 2.0
_SAFE = re.compile(r"^[A-Za-z0-9_.-]{1,128}$")


@dataclass(frozen=True)
class Life:
    """One worker of this host: `instance` names the engine it belongs to, `directory` where it is registered."""

    worker_id: str
    rank: int = 0
    instance: str = ""
    directory: str = ""
    mx_source_id: str = ""
    pid: int = 0
    started: str = ""
    host: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone; False for a note of another container, whose process ids mean nothing here."""
        return self.host == socket.gethostname() and started(self.pid) != self.started


def remember(life: Life) -> None:
    """Note that this process is `life`. A folder that cannot be written costs only the knowledge."""
    if _SAFE.match(life.worker_id):
        with contextlib.suppress(OSError, ConfigError):
            own = {"pid": os.getpid(), "started": started(os.getpid()), "host": socket.gethostname()}
            path = private_folder(FOLDER, make=True) / life.worker_id
            path.with_suffix(".new").write_text(json.dumps({**asdict(life), **own}), encoding="utf-8")
            path.with_suffix(".new").replace(path)


def forget(worker_id: str) -> None:
    """Drop the note, at the orderly end of a source."""
    if _SAFE.match(worker_id):
        with contextlib.suppress(OSError, ConfigError):
            (private_folder(FOLDER) / worker_id).unlink()


def gone() -> frozenset[str]:
    """Ids of workers of this host whose process has ended."""
    return frozenset(life.worker_id for life in _notes() if life.has_ended)


def retire(instance: str) -> int:
    """Tell the directory that the workers of `instance` on this host are STALE; how many were told. Bounded and best effort: the
    directory finds out by itself when their heartbeats stay away."""
    told = 0
    for life in _notes():
        if life.instance != instance or not life.directory or not life.mx_source_id:
            continue
        with contextlib.suppress(MxError), DirectoryClient(life.directory, timeout=FAREWELL_SECONDS, retry=False) as client:
            told += client.update_status(life.mx_source_id, life.worker_id, life.rank, p2p.SOURCE_STATUS_STALE)
    return told


def _notes() -> Iterator[Life]:
    with contextlib.suppress(OSError, ConfigError):
        for path in sorted(private_folder(FOLDER).iterdir()):
            with contextlib.suppress(OSError, ValueError, TypeError):
                yield Life(**json.loads(path.read_text(encoding="utf-8")))
