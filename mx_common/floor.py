"""Was a transfer as fast as it must be, and can it have happened at all: one judgement and one record for every path.

    verdict = check(WireTransfer("load", wire_bytes, wire_seconds, {"rank": 0, "model": "m"}), log)

Byte counts can be exact and coverage complete while a link runs at a twentieth of its rate, or while nothing moved at all;
only a rate with a bound on both sides shows it. Invariant: no other module computes a rate, compares a bound or spells a
marker, so no path can be without its floor.
"""

from __future__ import annotations

import logging
import math
import numbers
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mx_common import envs, metrics
from mx_common._frozen import FrozenMap
from mx_common._nic import SYSFS, link_gbps
from mx_common._records import emit, plain
from mx_common.errors import ConfigError, ImpossibleThroughput

__all__ = [
    "IMPOSSIBLE_MARKER",
    "IMPOSSIBLE_SCHEMA",
    "INSTALLED_MARKER",
    "INSTALLED_SCHEMA",
    "MARKER",
    "SCHEMA",
    "SLOW_MARKER",
    "SLOW_SCHEMA",
    "Bounds",
    "Verdict",
    "WireTransfer",
    "check",
    "configured_bounds",
    "gbps",
    "judge",
]

MARKER, SCHEMA = "MX_REFIT_THROUGHPUT", "refit-throughput-v1"
SLOW_MARKER, SLOW_SCHEMA = "MX_REFIT_SLOW_THROUGHPUT", "refit-slow-throughput-v1"
IMPOSSIBLE_MARKER, IMPOSSIBLE_SCHEMA = "MX_REFIT_IMPOSSIBLE_THROUGHPUT", "refit-impossible-throughput-v1"
# of a version that serves, with the seconds of what came after its transfer was judged
INSTALLED_MARKER, INSTALLED_SCHEMA = "MX_REFIT_INSTALLED", "refit-installed-v1"

# What every record says, null where the caller's context does not: a reader can rely on the keys.
_CONTEXT_KEYS = (
    "engine",
    "framework",
    "model",
    "version",
    "rank",
    "world",
    "host",
    "step",
    "descriptors",
    "transport",
    "policy",
    "peers",
)


@dataclass(frozen=True)
class WireTransfer:
    """The wire phase of one transfer of one rank: bytes moved, seconds from the first posted read to the last completion, and
    what the caller knows besides. `path` is `load`, `reshard` or `staged`; a figure that was not taken is None.

    `context["peers"]` lists each source's share, `{"source": ..., "wire_bytes": ..., "wire_s": ...}`, so that one slow rail
    can be told from all of them. Raises ConfigError when bytes or seconds are not numbers.
    """

    path: str
    wire_bytes: int | None
    wire_seconds: float | None
    context: Mapping[str, object] = field(default_factory=FrozenMap)

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError(f"WireTransfer.path={self.path!r}: name the path: load, reshard or staged")
        for name in ("wire_bytes", "wire_seconds"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
                raise ConfigError(f"WireTransfer.{name}={value!r}: give a number, None when it was not measured")
        if self.context is not None and not isinstance(self.context, Mapping):
            raise ConfigError(f"WireTransfer.context={self.context!r}: give a mapping of name to value")
        object.__setattr__(self, "context", FrozenMap(self.context or {}))


@dataclass(frozen=True)
class Bounds:
    """What a rank's rate must lie between, in Gbit/s, 0 for no bound; a floor of None is one that is wanted and not known.
    Transfers below `min_bytes` are not judged slow, as setting them up takes longer than the wire."""

    floor_gbps: float | None = 0.0
    ceiling_gbps: float = 0.0
    min_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("floor_gbps", "ceiling_gbps", "min_bytes"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"Bounds.{name}={value!r}: give a finite number >= 0 (0: no bound)")

    @property
    def armed(self) -> bool:
        """Whether a floor is in force."""
        return bool(self.floor_gbps)


@dataclass(frozen=True)
class Verdict:
    """`kind`, why (`reason`, for unmeasured), the rate where there is one, and the bounds it was held against."""

    kind: Literal["ok", "slow", "impossible", "unmeasured"]
    gbps: float | None
    bounds: Bounds
    reason: str = ""

    @property
    def armed(self) -> bool:
        """Whether a floor was in force: `ok` without it says nothing."""
        return self.bounds.armed


def gbps(wire_bytes: float | None, seconds: float | None) -> float | None:
    """The rate in Gbit/s; None when nothing moved, or no time passed, or either was not measured."""
    if wire_bytes is None or seconds is None or not (0 < wire_bytes < math.inf and 0 < seconds < math.inf):
        return None
    try:
        return wire_bytes * 8 / float(seconds) / 1e9
    except OverflowError:
        return math.inf


def judge(transfer: WireTransfer, bounds: Bounds) -> Verdict:
    """The verdict: a function of its arguments. A rate above the ceiling is impossible at any size."""
    rate = gbps(transfer.wire_bytes, transfer.wire_seconds)
    if rate is None:
        moved = transfer.wire_bytes is not None and 0 < transfer.wire_bytes < math.inf
        return Verdict("unmeasured", None, bounds, "no_time" if moved else "no_bytes")
    if rate > bounds.ceiling_gbps > 0:
        return Verdict("impossible", rate, bounds)
    if transfer.wire_bytes is not None and transfer.wire_bytes < bounds.min_bytes:
        return Verdict("unmeasured", rate, bounds, "below_min_bytes")
    if bounds.floor_gbps is None:
        return Verdict("unmeasured", rate, bounds, "no_link_rate")
    return Verdict("slow" if rate < bounds.floor_gbps else "ok", rate, bounds)


def configured_bounds(sysfs: Path = SYSFS) -> Bounds:
    """The bounds in force now. A floor of `auto` is a fraction of this rank's link: `MX_FLOOR_LINK_GBPS`, else the port of
    `UCX_NET_DEVICES`, else, where that names no RDMA port, the fastest port of the node."""
    wanted, ceiling = envs.MIN_GBPS.get(), envs.MAX_GBPS.get()
    floor = _auto_floor(sysfs) if wanted == "auto" else wanted
    return Bounds(floor, 0.0 if ceiling == "auto" else ceiling, envs.FLOOR_MIN_BYTES.get())


def _auto_floor(sysfs: Path) -> float | None:
    devices = (envs.foreign("UCX_NET_DEVICES") or "").split(",")
    link = envs.FLOOR_LINK_GBPS.get() or link_gbps(sysfs, devices)
    return None if link is None else link * envs.FLOOR_AUTO_FRACTION.get()


def check(transfer: WireTransfer, log: logging.Logger, sysfs: Path = SYSFS) -> Verdict:
    """Judge a transfer by the bounds in force and write its records; a slow one is still a correct one.

    Raises ImpossibleThroughput when the rate is above the ceiling: the bytes cannot have moved, nothing of them may be
    installed.
    """
    verdict = judge(transfer, configured_bounds(sysfs))
    _count(transfer, verdict)
    emit(MARKER, _record(transfer, verdict), log, logging.INFO)
    rate, floor, ceiling = verdict.gbps or 0.0, verdict.bounds.floor_gbps or 0.0, verdict.bounds.ceiling_gbps
    if verdict.kind == "slow":
        bound: dict[str, object] = {"floor_gbps": floor, "shortfall_x": _rounded(floor / rate if rate else math.inf, 2)}
        emit(
            SLOW_MARKER, {**transfer.context, "schema": SLOW_SCHEMA, **_wire(transfer, verdict), **bound}, log, logging.WARNING
        )
    elif verdict.kind == "impossible":
        bound = {"ceiling_gbps": ceiling, "excess_x": _rounded(rate / ceiling, 2)}
        record = {**transfer.context, "schema": IMPOSSIBLE_SCHEMA, **_wire(transfer, verdict), **bound}
        emit(IMPOSSIBLE_MARKER, record, log, logging.ERROR)
        raise ImpossibleThroughput(
            f"{transfer.path} on {plain(transfer.context.get('host')) or socket.gethostname()}: {transfer.wire_bytes} bytes in "
            f"{float(transfer.wire_seconds or 0):g} s are {rate:.1f} Gbit/s, above the ceiling of {ceiling:g} Gbit/s, so the "
            "payload did not move and nothing of it was installed; check this rank's transport, or raise MX_RESHARD_MAX_GBPS "
            "if the link really is that fast"
        )
    return verdict


def _count(transfer: WireTransfer, verdict: Verdict) -> None:
    """One transfer more on the metrics page, which has bytes per second."""
    path, who = transfer.path, {name: transfer.context.get(name) for name in ("engine", "framework")}
    floor = verdict.bounds.floor_gbps
    held = "unknown" if floor is None else "armed" if floor else "off"
    metrics.TRANSFERS.add(path=path, verdict=verdict.kind, reason=verdict.reason, floor=held, **who)
    metrics.TRANSFER_BYTES.add(transfer.wire_bytes, path=path, **who)
    metrics.FLOOR.set(None if floor is None else floor * 1e9 / 8, path=path)
    if verdict.gbps is not None:
        metrics.TRANSFER_SECONDS.observe(transfer.wire_seconds, path=path)
        metrics.TRANSFER_RATE.observe(verdict.gbps * 1e9 / 8, path=path)
        metrics.LAST_RATE.set(verdict.gbps * 1e9 / 8, path=path)
    if verdict.kind == "impossible":
        metrics.EVENT_AGE.mark(event="impossible")


def _record(transfer: WireTransfer, verdict: Verdict) -> dict[str, object]:
    """The record every transfer has. What was measured and judged wins over the caller's words of the same name."""
    known: dict[str, object] = dict.fromkeys(_CONTEXT_KEYS)
    known["host"] = socket.gethostname()
    return {
        **known,
        **transfer.context,
        "schema": SCHEMA,
        "path": transfer.path,
        "verdict": verdict.kind,
        "reason": verdict.reason or None,
        "armed": verdict.armed,
        "floor": verdict.bounds.floor_gbps,
        "ceiling": verdict.bounds.ceiling_gbps,
        **_wire(transfer, verdict),
    }


def _wire(transfer: WireTransfer, verdict: Verdict) -> dict[str, object]:
    return {
        "wire_bytes": transfer.wire_bytes,
        "wire_s": _rounded(transfer.wire_seconds, 6),
        "implied_gbps": _rounded(verdict.gbps, 1),
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return round(float(value), digits) if value is not None and math.isfinite(value) else None
