"""Writes the records of the floor: one marked line through the caller's logger, one line in this process's `MX_RECORDS_FILE`.

Invariant: every line is RFC 8259 JSON in ASCII that its schema describes, and emitting never raises: a transfer is not undone
by a full disk, a broken log handler or a context value that cannot be shown.
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
from typing import Any

from mx_common import envs
from mx_common._once import warn_once
from mx_common.source_load import as_float

__all__ = ["INSTALLED_TYPES", "TRANSFER_TYPES", "Types", "emit", "plain", "typed"]

_log = logging.getLogger(__name__)

_DEPTH = 6

Types = Mapping[str, Mapping[str, Any]]
"""Key of a record -> its type, in the words of JSON Schema. `type` lists kinds, the one that is wanted first, null last."""

_SECONDS = {"type": ["number", "null"], "minimum": 0}
_NAME = {"type": ["string", "null"]}
_PEER = {
    "type": "object",
    "properties": {
        "source": {"type": "string"},
        "wire_bytes": {"type": ["number", "string", "null"]},
        "wire_s": {"type": ["number", "string", "null"]},
    },
    "required": ["source", "wire_bytes", "wire_s"],
}
_WAY = {"type": ["integer", "string", "null"]}

# docs/schemas says the same to readers; a test compares the two
TRANSFER_TYPES: Types = {
    "wire_bytes": {"type": ["integer", "number", "string", "null"]},
    "peers": {"type": ["array", "string", "null"], "items": _PEER},
    "minimum_bytes": {"type": ["integer", "number", "string", "null"]},
    "choice": {"type": ["object", "string", "null"], "properties": {"exact": _WAY, "whole": _WAY}},
    "verified": {"type": ["boolean", "string", "null"]},
    "fallback": {"type": ["boolean", "string", "null"]},
    "stages_s": {"type": ["object", "string", "null"]},
    "worker_id": {"type": ["string", "integer", "number", "null"]},
}
INSTALLED_TYPES: Types = {
    "engine": _NAME,
    "model": _NAME,
    "version": {"type": ["integer", "null"]},
    "rank": {"type": ["integer", "null"], "minimum": 0},
    "world": {"type": ["integer", "null"], "minimum": 1},
    "host": _NAME,
    "step": {"type": ["integer", "null"]},
    "worker_id": _NAME,
    "stages_s": {"type": ["object", "null"], "additionalProperties": _SECONDS, "required": ["install"]},
}


def emit(marker: str, record: Mapping[str, object], log: logging.Logger, level: int, types: Types = TRANSFER_TYPES) -> None:
    """Log `marker` and the record, its keys of these `types`, and append the record to the records file when there is one."""
    try:
        said = typed(record, types)
        # the schema first, so that a line that was cut still says what it was
        line = json.dumps({key: said[key] for key in sorted(said, key=lambda key: key != "schema")}, allow_nan=False)
        with contextlib.suppress(Exception):  # handlers are the caller's, and the file must be written whatever they do
            log.log(level, "%s %s", marker, line)
        pattern = envs.RECORDS_FILE.get()
        if pattern:
            _append(_path(pattern, record.get("rank")), line)
    except Exception as error:  # a record is telemetry of a transfer that is over; see the module's invariant
        with contextlib.suppress(Exception):
            warn_once(_log, ("emit", type(error).__name__), "a throughput record could not be written: %r", error)


def typed(record: Mapping[str, object], types: Types) -> dict[str, object]:
    """`record` in types JSON has: keys of `types` brought to their type, or null where they cannot be; all others as `plain`."""
    said = _plain_mapping(record, _DEPTH)
    return {key: _fitted_or_null(value, types[key]) if key in types else value for key, value in said.items()}


def plain(value: object, depth: int = _DEPTH) -> object:
    """`value` in types JSON has; what JSON cannot carry (NaN and infinity too) becomes its `str`."""
    try:
        return _plain(value, depth)
    except Exception:  # a caller's type may raise anything when it is looked at
        return _shown(value)


def _plain(value: object, depth: int) -> object:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value) if abs(int(value)) < 2**64 else _shown(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(as_float(value)) else _shown(value)
    if depth and isinstance(value, Mapping):
        return _plain_mapping(value, depth)
    if depth and isinstance(value, (list, tuple)):
        return [plain(item, depth - 1) for item in value]
    return _shown(value)


def _plain_mapping(value: Mapping[Any, object], depth: int) -> dict[str, object]:
    found = {key: plain(item, depth - 1) for key, item in value.items() if isinstance(key, str)}
    for key, item in value.items():
        if not isinstance(key, str):  # and does not replace a key that is what this one is only shown as
            found.setdefault(_shown(key), plain(item, depth - 1))
    return found


class _Unfit(Exception):
    """A value that cannot be brought to its type."""


def _fitted_or_null(value: object, rule: Mapping[str, Any]) -> object:
    try:
        return _fitted(value, rule)
    except _Unfit:
        return None


def _fitted(value: object, rule: Mapping[str, Any]) -> object:
    """A `plain` value as the first kind of the rule that it can be brought to. Raises _Unfit when there is none."""
    kinds = [rule["type"]] if isinstance(rule["type"], str) else rule["type"]
    for kind in kinds:
        if kind == "null":
            return None
        if kind == "boolean" and (isinstance(value, bool) or value in (0, 1)):
            return bool(value)
        if kind in ("integer", "number"):
            figure = _figure(value, whole=kind == "integer")
            if figure is not None and figure >= rule.get("minimum", -math.inf):
                return figure
        if kind == "string" and isinstance(value, str):
            return value
        if kind == "string" and kind == kinds[0] and "number" not in kinds and _figure(value) is not None:
            return str(value)
        if kind == "object" and isinstance(value, dict):
            return _fitted_object(value, rule)
        if kind == "array" and isinstance(value, list):
            try:
                return [_fitted(item, rule["items"]) for item in value]
            except _Unfit:
                continue
    raise _Unfit


def _fitted_object(value: Mapping[str, object], rule: Mapping[str, Any]) -> dict[str, object]:
    own, other = rule.get("properties", {}), rule.get("additionalProperties")
    found: dict[str, object] = {}
    for name in dict.fromkeys((*value, *rule.get("required", ()))):
        item, its = value.get(name), own.get(name, other)
        found[name] = item if its is None else _fitted(item, its)
    return found


def _figure(value: object, whole: bool = False) -> int | float | None:
    """The number that a plain value is, or is the text of; None for none, and for a fraction where it must be `whole`."""
    figure = value
    if isinstance(value, str):
        try:
            figure = int(value) if value.isdecimal() else float(value)
        except ValueError:
            return None
    if isinstance(figure, bool) or not isinstance(figure, (int, float)) or not math.isfinite(as_float(figure)):
        return None
    if abs(figure) >= 2**64:
        return None if whole else float(figure)
    if not whole:
        return figure
    return int(figure) if figure == int(figure) else None


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
