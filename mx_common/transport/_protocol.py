"""What every transport does, and what one transfer reports.

    def pull(transport: Transport, metadata: bytes, reads: Reads) -> WireResult:
        peer = transport.connect(metadata)
        try:
            return transport.read(peer, reads, timeout=300, stall_timeout=30)
        finally:
            transport.disconnect(peer)

Invariant: `read` returns only when every byte has arrived. It knows nothing of content: a source that overwrites its memory
while it is read gives mixed bytes, so versions and digests are compared by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mx_common.errors import ConfigError
from mx_common.transport._columns import Reads, Regions

__all__ = ["Progress", "Transport", "WireResult", "check_timeouts"]

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) whenever bytes have arrived, from the reading thread; what it raises aborts the
read."""


@dataclass(frozen=True)
class WireResult:
    """Bytes moved, seconds from the first post to the last completion by our own clock, reads posted after coalescing, and the
    transport that really carried them (`ucx:tcp`, …; as exact as could be observed)."""

    wire_bytes: int
    wire_seconds: float
    descriptors: int
    transport: str

    def __post_init__(self) -> None:
        if self.wire_bytes < 0 or self.descriptors < 0 or not (math.isfinite(self.wire_seconds) and self.wire_seconds >= 0):
            raise ConfigError(f"a transfer cannot report {self}; bytes, seconds and descriptors are finite and not negative")


class Transport(Protocol):
    """One agent of this process: registers local memory, reads remote memory, and lets peers read what it registered."""

    @property
    def name(self) -> str:
        """The agent name that peers know."""

    @property
    def tainted(self) -> bool:
        """Whether a read was aborted: late bytes may land in its local memory until `close` has returned."""

    def register(self, regions: Regions) -> None:
        """Make memory readable by peers and writable by own reads; touching regions become one registration.

        The memory must stay allocated until `close`. Raises TransferError when the backend refuses it."""

    def deregister(self) -> None:
        """Drop all registrations. This does not revoke access: a peer that holds old metadata may still read mapped memory."""

    def metadata(self) -> bytes:
        """What peers need for `connect`; covers what is registered now."""

    def connect(self, metadata: bytes) -> str:
        """The peer's name. Raises TransferError for metadata that cannot be used."""

    def connect_listener(self, agent_name: str, host: str, port: int, timeout: float) -> str:
        """Like `connect`, for a peer that publishes its metadata on a socket. Raises TransferTimeout after `timeout`
        seconds."""

    def read(
        self, peer: str, reads: Reads, *, timeout: float, stall_timeout: float, progress: Progress | None = None
    ) -> WireResult:
        """Copy every byte of `reads`. Seconds: `timeout` for all, `stall_timeout` without any byte.

        Raises TransferTimeout, SourceLost when the peer is gone, TransferError for reads the peer or this side does not
        allow."""

    def disconnect(self, peer: str) -> None:
        """Forget the peer; its name may be connected again. Unknown names are ignored."""

    def serve(self, active: Callable[[], bool]) -> None:
        """Keep readers of this agent's memory advancing, from a daemon thread; quickly while `active()` (read leases are
        open)."""

    def nudge(self) -> None:
        """A reader is about to connect: look after it at once. Does nothing while nothing is served."""

    def stop_serving(self) -> None:
        """End the thread of `serve`."""

    def close(self) -> None:
        """Destroy the agent. Only after this returned is local memory of aborted reads quiet. Idempotent; no use after it."""


def check_timeouts(timeout: float, stall_timeout: float) -> None:
    """Raises ConfigError unless both are positive numbers of seconds."""
    for name, value in (("timeout", timeout), ("stall_timeout", stall_timeout)):
        if not value > 0:
            raise ConfigError(f"{name} is {value!r}; give a positive number of seconds")
