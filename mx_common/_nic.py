"""The RDMA ports of this node as sysfs shows them: their rate and their byte counters.

    for port in active_ports(SYSFS):
        port.gbps, port.octets("rcv")

Invariant: reads files only, and only those of ports that are up; a file that is absent or makes no sense is None, never an
exception.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["SYSFS", "Port", "active_ports", "link_gbps"]

SYSFS = Path("/sys/class/infiniband")

_COUNTER_UNIT = 4  # the InfiniBand specification counts port data in words of four octets
_NAME = re.compile(r"[^\s:^]+:\d+")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*Gb/sec", re.IGNORECASE)


@dataclass(frozen=True)
class Port:
    """One port that is up: `name` as UCX spells it (`mlx5_0:1`), its signalling rate, and where its files are."""

    name: str
    gbps: float
    directory: Path

    def octets(self, direction: Literal["xmit", "rcv"]) -> int | None:
        """Octets that went out or came in since the counter started; None when it cannot be read."""
        text = _text(self.directory / "counters" / f"port_{direction}_data")
        return int(text) * _COUNTER_UNIT if text is not None and text.isascii() and text.isdigit() else None


def active_ports(root: Path) -> list[Port]:
    """Every port under `root` that is not known to be down and says its rate."""
    try:
        directories = sorted(root.glob("*/ports/*"))
    except OSError:
        return []
    ports = []
    for directory in directories:
        rate = _RATE.match(_text(directory / "rate") or "")
        state = _text(directory / "state")
        if rate and float(rate[1]) > 0 and (state is None or "ACTIVE" in state.upper()):
            ports.append(Port(f"{directory.parent.parent.name}:{directory.name}", float(rate[1]), directory))
    return ports


def link_gbps(root: Path, wanted: Collection[str] = ()) -> float | None:
    """Rate of the fastest of the `wanted` ports that are up, in Gbit/s; None when none is. Names that are of no RDMA port (`eth0`, `all`)
    do not count; without any other, all ports are wanted."""
    names = {name for one in wanted if _NAME.fullmatch(name := one.strip())}
    return max((port.gbps for port in active_ports(root) if not names or port.name in names), default=None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text("ascii", errors="replace").strip()
    except OSError:
        return None
