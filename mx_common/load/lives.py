"""Remembers which workers ran on this host, so that a target never tries to read from a process that has ended here.

After a crash the directory lists the dead worker as READY until its heartbeats are missed. A process of the same host knows better:

    with_lives = lives.remember(worker_id)      # a source, when it registers
    lives.gone()                                # a target: ids of workers of this host that have ended

Invariant: an id is reported gone only when its process, by id and start time, does not exist. No file, no opinion.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

from mx_common import envs

__all__ = ["forget", "gone", "remember"]

_SAFE = re.compile(r"^[A-Za-z0-9_.-]{1,128}$")


def remember(worker_id: str) -> None:
    """Note that this process serves as `worker_id`. A directory that cannot be written costs only the knowledge."""
    if not _SAFE.match(worker_id):
        return
    with contextlib.suppress(OSError):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / worker_id).write_text(f"{os.getpid()} {_start_time(os.getpid())} {socket.gethostname()}", encoding="utf-8")


def forget(worker_id: str) -> None:
    """Drop the note, at the orderly end of a source."""
    if _SAFE.match(worker_id):
        with contextlib.suppress(OSError):
            (_folder() / worker_id).unlink()


def gone() -> frozenset[str]:
    """Ids of workers of this host whose process has ended. Notes of ended processes stay until the directory can have forgotten them."""
    ended = set()
    with contextlib.suppress(OSError):
        for note in _folder().iterdir():
            if _has_ended(note):
                ended.add(note.name)
    return frozenset(ended)


def _has_ended(note: Path) -> bool:
    try:
        pid, start, host = note.read_text(encoding="utf-8").split(" ", 2)
        if host != socket.gethostname():  # another container that shares the folder: its process ids mean nothing here
            return False
        return _start_time(int(pid)) != start
    except (OSError, ValueError):
        return False


def _folder() -> Path:
    return envs.runtime_dir() / "workers"


def _start_time(pid: int) -> str:
    """Start time in clock ticks since boot, field 22 of /proc/PID/stat; "" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""
