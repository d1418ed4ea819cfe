"""In-process reference transport: the protocol's rules with memory copies, for tests and for checks of a plan.

    source, target = LocalTransport("source"), LocalTransport("target")
    source.register(regions_a); target.register(regions_b)
    target.read(target.connect(source.metadata()), reads, timeout=10, stall_timeout=10)

Invariant: it refuses what the real transport refuses (unregistered ranges on either side, unknown or closed peers, use after
close), before the first byte is copied. `fault`, when given, is called with the bytes done before each read's copy; what it
raises aborts the transfer.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mx_common.errors import ConfigError, SourceLost, TransferError, TransferTimeout
from mx_common.transport._columns import MEMORY_KINDS, Reads, Regions
from mx_common.transport._protocol import Progress, WireResult, check_timeouts

__all__ = ["LocalTransport"]

_agents: weakref.WeakValueDictionary[str, LocalTransport] = weakref.WeakValueDictionary()
_agents_lock = threading.Lock()


class LocalTransport:
    """Host memory of this process only. Raises ConfigError when the name is taken by an open one."""

    def __init__(self, name: str, *, fault: Callable[[int], None] | None = None) -> None:
        self._name = name
        self._fault = fault
        self._registered: list[Regions] = []
        self._peers: dict[str, tuple[LocalTransport, Regions]] = {}
        self._closed = False
        self._tainted = False
        with _agents_lock:
            if name in _agents:
                raise ConfigError(f"an agent named {name!r} is open in this process; give each its own name")
            _agents[name] = self

    @property
    def name(self) -> str:
        return self._name

    @property
    def tainted(self) -> bool:
        return self._tainted

    def register(self, regions: Regions) -> None:
        self._check_open()
        if regions.mem != "DRAM":
            raise TransferError(f"{self._name}: the in-process transport copies host memory only, not {regions.mem}")
        self._registered.append(regions.merged())

    def deregister(self) -> None:
        self._check_open()
        self._registered.clear()

    def metadata(self) -> bytes:
        self._check_open()
        columns = {kind: Regions.joined(self._registered, kind).merged().rows().tolist() for kind in MEMORY_KINDS}
        return json.dumps({"agent": self._name, "regions": columns}).encode()

    def connect(self, metadata: bytes) -> str:
        self._check_open()
        try:
            described = json.loads(metadata)
            peer = str(described["agent"])
            columns = np.array(described["regions"]["DRAM"], dtype=np.uint64).reshape(-1, 3)
        except (ValueError, KeyError, TypeError) as error:
            raise TransferError(f"{self._name}: these {len(metadata)} bytes are not metadata of an in-process agent") from error
        if peer == self._name:
            raise TransferError(f"{self._name}: this is its own metadata; connect to another agent")
        with _agents_lock:
            agent = _agents.get(peer)
        if agent is None:
            raise SourceLost(f"{self._name}: no agent named {peer!r} is open in this process; it was closed")
        self._peers[peer] = (agent, Regions(columns[:, 0], columns[:, 1], columns[:, 2]))
        return peer

    def connect_listener(self, agent_name: str, host: str, port: int, timeout: float) -> str:
        self._check_open()
        with _agents_lock:
            agent = _agents.get(agent_name)
        if agent is None:
            raise TransferTimeout(f"{self._name}: no agent named {agent_name!r} is open in this process ({host}:{port})")
        return self.connect(agent.metadata())

    def read(
        self, peer: str, reads: Reads, *, timeout: float, stall_timeout: float, progress: Progress | None = None
    ) -> WireResult:
        self._check_open()
        check_timeouts(timeout, stall_timeout)
        if peer not in self._peers:
            raise TransferError(f"{self._name}: {peer!r} is not connected; call connect with its metadata first")
        source, readable = self._peers[peer]
        joined = reads.coalesced()
        own = Regions.joined(self._registered, "DRAM")
        _check_inside("local", own.covers(joined.local_addr, joined.length, joined.local_device), joined.local_addr, self._name)
        _check_inside(
            "remote", readable.covers(joined.remote_addr, joined.length, joined.remote_device), joined.remote_addr, peer
        )
        done, total = 0, joined.total_bytes
        start = time.perf_counter()
        try:
            for row in range(len(joined)):
                if self._fault is not None:
                    self._fault(done)
                self._check_open()
                if source._closed:
                    raise SourceLost(f"{self._name}: {peer!r} closed after {done} of {total} bytes")
                if time.perf_counter() - start > timeout:
                    raise TransferTimeout(
                        f"{self._name}: {done} of {total} bytes from {peer!r} after {timeout:g} s (MX_TRANSFER_TIMEOUT)"
                    )
                ctypes.memmove(int(joined.local_addr[row]), int(joined.remote_addr[row]), int(joined.length[row]))
                done += int(joined.length[row])
                if progress is not None:
                    progress(done, total)
        except BaseException:
            self._tainted = True
            raise
        return WireResult(total, time.perf_counter() - start, len(joined), "local")

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def serve(self, active: Callable[[], bool]) -> None:
        self._check_open()  # readers copy by themselves; there is nothing to keep moving

    def nudge(self) -> None:
        pass

    def stop_serving(self) -> None:
        pass

    def close(self) -> None:
        self._closed = True
        self._peers.clear()
        self._registered.clear()
        with _agents_lock:
            if _agents.get(self._name) is self:
                del _agents[self._name]

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError(f"{self._name}: the transport is closed; open a new one")


def _check_inside(side: str, inside: npt.NDArray[np.bool_], addr: npt.NDArray[np.uint64], owner: str) -> None:
    if not inside.all():
        row = int(np.flatnonzero(~inside)[0])
        raise TransferError(
            f"{len(inside) - int(inside.sum())} of {len(inside)} reads leave the {side} memory that {owner!r} registered, "
            f"the first at {int(addr[row]):#x}; register it, or take addresses from a fresh manifest"
        )
