"""Writes the records of the floor: one marked line through the caller's logger, one line in this process's `MX_RECORDS_FILE`.

Invariant: every line is RFC 8259 JSON in ASCII, and emitting never raises: a transfer is not undone by a full disk, a broken
log handler or a context value that cannot be shown.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import numbers
import os
import re
from collections.abc import Mapping
from pathlib import Path

from mx_common import envs
from mx_common._once import warn_once
from mx_common.source_load import as_float

__all__ = ["emit", "plain"]

_log = logging.getLogger(__name__)

_DEPTH = 6


def emit(marker: str, record: Mapping[str, object], log: logging.Logger, level: int) -> None:
    """Log `marker` and the record, and append the record to the records file when there is one."""
    try:
        line = json.dumps(plain(record), allow_nan=False)
        with contextlib.suppress(Exception):  # handlers are the caller's, and the file must be written whatever they do
            log.log(level, "%s %s", marker, line)
        pattern = envs.RECORDS_FILE.get()
        if pattern:
            _append(_path(pattern, record.get("rank")), line)
    except Exception as error:  # a record is telemetry of a transfer that is over; see the module's invariant
        with contextlib.suppress(Exception):
            warn_once(_log, ("emit", type(error).__name__), "a throughput record could not be written: %r", error)


def plain(value: object, depth: int = _DEPTH) -> object:
    """`value` in types JSON has; what JSON cannot carry (NaN and infinity too) becomes its `str`."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value) if abs(int(value)) < 2**64 else _shown(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(as_float(value)) else _shown(value)
    if depth and isinstance(value, Mapping):
        return {key if isinstance(key, str) else _shown(key): plain(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, (list, tuple)):
        return [plain(item, depth - 1) for item in value]
    return _shown(value)


def _shown(value: object) -> str:
    try:
        return str(value)
    except Exception:  # a caller's __str__ may raise anything, and an int of thousands of digits has none
        return f"<{type(value).__name__}>"


def _path(pattern: str, rank: object) -> Path:
    """The records file of this process: `{pid}` and `{rank}` filled in, a pid added before the suffix when it is not asked
    for."""
    shown = "x" if rank is None else re.sub(r"[^A-Za-z0-9_-]", "_", _shown(rank))
    pid = str(os.getpid())
    path = Path(pattern.replace("{rank}", shown).replace("{pid}", pid))
    return path if "{pid}" in pattern else path.with_name(f"{path.stem}.{pid}{path.suffix}")


def _append(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # one write of an append-mode file: lines of threads do not mix
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(handle, f"{line}\n".encode("ascii"))
    finally:
        os.close(handle)
