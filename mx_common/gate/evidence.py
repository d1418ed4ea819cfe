"""What was measured: one row a transfer, and what of the input could not be counted.

    evidence = read(["logs/"])
    evidence.transfers, evidence.troubles

A transfer that is written in a log and in a records file is one transfer. Invariant: a record that is not understood is a trouble, with
file and line.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from mx_common.floor import IMPOSSIBLE_SCHEMA, INSTALLED_SCHEMA, SCHEMA, SLOW_SCHEMA
from mx_common.gate._lines import Found, find
from mx_common.gate.breakdown import Breakdown
from mx_common.source_load import as_float

__all__ = ["Evidence", "Transfer", "Trouble", "read"]

_VERDICTS = frozenset({"ok", "slow", "impossible", "unmeasured"})
STEPLESS = "load"
"""A replica loads once: its records have step 0, and belong to no step of a run."""
_ROUNDED = 0.1  # records have rates with one decimal
_ALARMS = {SLOW_SCHEMA: "slow", IMPOSSIBLE_SCHEMA: "impossible"}


@dataclass(frozen=True, slots=True)
class Transfer:
    """One record. `rank` and `step` are None when it names none, and `step` of a load. Rates and bounds are Gbit/s; a `floor` of None was
    wanted and not known."""

    path: str
    model: str
    rank: int | None
    step: int | None
    host: str
    verdict: str
    reason: str
    armed: bool
    seconds: float | None
    gbps: float | None
    floor: float | None
    ceiling: float
    wire_bytes: float
    file: str
    line: int

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}"

    @property
    def comparable(self) -> bool:
        """Whether its rate says how fast the link is: it was measured, on enough bytes, and can have been."""
        return self.gbps is not None and (self.verdict in ("ok", "slow") or self.reason == "no_link_rate")

    @property
    def name(self) -> str:
        """What a person calls it."""
        rank = "no rank" if self.rank is None else f"rank {self.rank}"
        return f"{self.path} {rank} step {'-' if self.step is None else self.step}"


@dataclass(frozen=True, slots=True)
class Trouble:
    """A line that should have been a record and is none."""

    what: str
    file: str
    line: int


@dataclass
class Evidence:
    """Everything that was read. `breakdown`: sums of what the transfers say beside their rates."""

    transfers: list[Transfer] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    breakdown: Breakdown = field(default_factory=Breakdown)


def read(inputs: Sequence[str], stdin: IO[bytes] | None = None) -> Evidence:
    """Raises ConfigError for an input that cannot be read."""
    return of(find(inputs, stdin))


def of(found: Iterable[Found]) -> Evidence:
    """Counts what was found."""
    evidence = Evidence()
    seen: set[int] = set()
    judged: set[tuple[Any, ...]] = set()
    alarms: list[tuple[Transfer, Mapping[str, Any]]] = []
    for one in found:
        if one.record is None:
            evidence.troubles.append(Trouble(one.trouble, one.file, one.line))
            continue
        if one.record.get("schema") == INSTALLED_SCHEMA:
            _took(evidence.breakdown, one.record)
            continue
        row = _transfer(one.record, one)
        if isinstance(row, Trouble):
            evidence.troubles.append(row)
            continue
        same = hash(json.dumps(one.record, sort_keys=True))
        if same in seen:
            continue
        seen.add(same)
        if one.record["schema"] == SCHEMA:
            evidence.transfers.append(row)
            evidence.breakdown.add(row, one.record)
            if row.verdict in _ALARMS.values():
                judged.add(_identity(row))
        elif _identity(row) not in judged:
            alarms.append((row, one.record))
    # an alarm whose transfer's own line was lost, because INFO lines were off, say, is still a transfer
    for row, record in alarms:
        if _identity(row) not in judged:
            judged.add(_identity(row))
            evidence.transfers.append(row)
            evidence.breakdown.add(row, record)
    return evidence


def _took(breakdown: Breakdown, record: Mapping[str, Any]) -> None:
    breakdown.took(
        str(record.get("path") or "unknown"),
        str(record.get("model") or ""),
        _whole(record.get("step")),
        _whole(record.get("rank")),
        str(record.get("host") or ""),
        record.get("stages_s"),
    )


def _identity(row: Transfer) -> tuple[Any, ...]:
    return row.verdict, row.rank, row.step, row.wire_bytes, row.seconds


def _transfer(record: Mapping[str, Any], one: Found) -> Transfer | Trouble:
    schema = record.get("schema")
    if not isinstance(schema, str) or (schema != SCHEMA and schema not in _ALARMS):
        return Trouble(f"unknown schema {schema!r}" if schema else "truncated record", one.file, one.line)
    alarm = schema in _ALARMS
    verdict = _ALARMS[schema] if alarm else record.get("verdict")
    path = record.get("path") if not alarm else record.get("path") or "unknown"
    wrong = [
        name
        for name, holds in (
            ("path", isinstance(path, str) and path != ""),
            ("verdict", isinstance(verdict, str) and verdict in _VERDICTS),
            ("armed", alarm or isinstance(record.get("armed"), bool)),
            *((name, _is_whole(record.get(name))) for name in ("rank", "step")),
            *((name, _is_figure(record.get(name))) for name in ("wire_s", "implied_gbps", "wire_bytes")),
        )
        if not holds
    ]
    if wrong:
        return Trouble(f"a record without a valid {', '.join(wrong)}", one.file, one.line)
    row = Transfer(
        path=str(path),
        model=sys.intern(str(record.get("model") or "")),
        rank=record.get("rank"),
        step=None if path == STEPLESS else record.get("step"),
        host=sys.intern(str(record.get("host") or "")),
        verdict=sys.intern(str(verdict)),
        reason=str(record.get("reason") or ""),
        armed=alarm or bool(record["armed"]),
        seconds=_number(record.get("wire_s")),
        gbps=_number(record.get("implied_gbps")),
        floor=_number(record.get("floor_gbps" if alarm else "floor")),
        ceiling=_number(record.get("ceiling_gbps" if alarm else "ceiling")) or 0.0,
        wire_bytes=_number(record.get("wire_bytes")) or 0.0,
        file=sys.intern(one.file),
        line=one.line,
    )
    contradiction = "" if alarm else _contradiction(row)
    return Trouble(f"a record that contradicts itself: {contradiction}", one.file, one.line) if contradiction else row


def _contradiction(row: Transfer) -> str:
    """What of its own figures its verdict does not follow from; "" when it does."""
    floor, rate = row.floor or 0.0, row.gbps
    if row.armed and floor <= 0:
        return "a floor is in force, and none is given"
    if row.verdict == "unmeasured":
        return ""
    if rate is None or row.seconds is None or row.wire_bytes <= 0:
        return f"{row.verdict} without bytes, seconds or a rate"
    if row.verdict == "slow" and (not row.armed or rate > floor + _ROUNDED):
        return f"slow at {rate:g} Gbit/s, with a floor of {floor:g}"
    if row.verdict == "ok" and row.armed and rate < floor - _ROUNDED:
        return f"ok at {rate:g} Gbit/s, with a floor of {floor:g}"
    if row.verdict == "ok" and 0 < row.ceiling < rate - _ROUNDED:
        return f"ok at {rate:g} Gbit/s, with a ceiling of {row.ceiling:g}"
    return ""


def _is_figure(value: object) -> bool:
    return value is None or (not isinstance(value, bool) and 0 <= as_float(value) < math.inf)


def _is_whole(value: object) -> bool:
    return value is None or _whole(value) is not None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: object) -> float | None:
    return as_float(value) if value is not None and not isinstance(value, bool) and math.isfinite(as_float(value)) else None
