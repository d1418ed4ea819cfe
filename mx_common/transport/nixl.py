"""NIXL one-sided reads: RDMA where there is a NIC, tcp or a kernel copy between processes where there is none.

    transport = NixlTransport("worker-7")
    transport.register(Regions(addr, length, device, "DRAM"))
    result = transport.read(transport.connect(metadata), reads, timeout=300, stall_timeout=30)
    transport.serve(active=leases.any_open)
    transport.close()

No progress thread runs, so an idle agent takes no core; a source calls `serve`. What NIXL does not promise, and callers must
keep: memory stays allocated while a peer may read it (a source that frees memory under a tcp reader dies with SIGSEGV, and
deregistering revokes nothing: leases decide); content is not checked (torn reads: compare digests). A stopped source is
noticed only where it has to take part, as on tcp. Invariant: after an aborted read `tainted` is true and local memory may
still change, until `close`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from mx_common import envs
from mx_common.errors import TransferError, TransferTimeout
from mx_common.transport._agent import Agent
from mx_common.transport._columns import Reads, Regions
from mx_common.transport._flight import Flight
from mx_common.transport._protocol import Progress, WireResult, check_timeouts
from mx_common.transport._serving import Pump

__all__ = ["NixlTransport"]

log = logging.getLogger(__name__)

_LISTENER_PAUSE = 0.01
_LISTENER_RETRY = 1.0


class NixlTransport:
    """One NIXL agent. `backend`: MX_NIXL_BACKEND unless given; `listen_port`: publish the metadata on this TCP port of all
    interfaces (0: any free one). Raises TransportUnavailable when the package or the backend cannot be used here."""

    def __init__(
        self,
        name: str,
        *,
        backend: str | None = None,
        listen_port: int | None = None,
        opener: Callable[[str, str, int | None], Agent] = Agent,
    ) -> None:
        self._name = name
        self._backend = envs.NIXL_BACKEND.get() if backend is None else backend
        self._opener = opener
        self._listening = listen_port is not None
        self._lock = threading.RLock()
        self._registered: list[tuple[Regions, object]] = []
        self._peers: set[str] = set()
        self._published = False
        self._tainted = False
        self._pump: Pump | None = None
        self._agent = opener(name, self._backend, listen_port)

    @property
    def name(self) -> str:
        return self._name

    @property
    def tainted(self) -> bool:
        return self._tainted

    def register(self, regions: Regions) -> None:
        if not len(regions):
            return
        merged = regions.merged()
        with self._lock:
            try:
                self._registered.append((merged, self._agent.register(merged.rows(), merged.mem)))
            except TransferError as error:
                if len(merged) == len(regions):
                    raise
                # a device driver may refuse one registration over two allocations that happen to touch
                log.warning("%s; registering %d regions one by one", error, len(regions))
                self._registered.append((regions, self._agent.register(regions.rows(), regions.mem)))

    def deregister(self) -> None:
        with self._lock:
            while self._registered:
                self._agent.deregister(self._registered.pop()[1])

    def metadata(self) -> bytes:
        with self._lock:
            self._published = True
            return self._agent.metadata()

    def connect(self, metadata: bytes) -> str:
        with self._lock:
            peer = self._agent.add_remote(metadata)
            self._peers.add(peer)
            return peer

    def connect_listener(self, agent_name: str, host: str, port: int, timeout: float) -> str:
        check_timeouts(timeout, timeout)
        self._listen()
        deadline = time.monotonic() + timeout
        asked = 0.0
        while True:
            now = time.monotonic()
            if now - asked >= _LISTENER_RETRY:  # NIXL asks once and only logs a refused connection
                self._agent.fetch_remote(agent_name, host, port)
                asked = now
            if self._agent.has_remote(agent_name):
                self._peers.add(agent_name)
                return agent_name
            if now >= deadline:
                raise TransferTimeout(
                    f"{self._name}: no metadata of agent {agent_name!r} from {host}:{port} within {timeout:g} s; check that "
                    "the source is up, that this is its NIXL listen port, and that the agent name is the one it runs under"
                )
            time.sleep(_LISTENER_PAUSE)

    def _listen(self) -> None:
        """NIXL fetches metadata only in agents that listen themselves; an agent nobody knows yet is opened again as one."""
        with self._lock:
            if self._listening:
                return
            if self._published or self._peers or self._pump is not None or self._tainted:
                raise TransferError(
                    f"{self._name}: this agent is in use and was opened without a listener; open it with "
                    "listen_port=0 to fetch metadata"
                )
            self._agent.destroy()
            self._agent = self._opener(self._name, self._backend, 0)
            self._listening = True
            again, self._registered = self._registered, []
            for regions, _ in again:
                self.register(regions)

    def read(
        self, peer: str, reads: Reads, *, timeout: float, stall_timeout: float, progress: Progress | None = None
    ) -> WireResult:
        check_timeouts(timeout, stall_timeout)
        if peer not in self._peers:
            raise TransferError(f"{self._name}: {peer!r} is not connected; call connect with its metadata first")
        if not len(reads):
            return WireResult(0, 0.0, 0, self._backend.lower())
        flight = Flight(self._agent, peer, reads, timeout=timeout, stall_timeout=stall_timeout, progress=progress)
        try:
            return flight.run()
        finally:
            self._tainted = self._tainted or flight.moving

    def disconnect(self, peer: str) -> None:
        with self._lock:
            if peer in self._peers:
                self._peers.discard(peer)
                self._agent.remove_remote(peer)

    def serve(self, active: Callable[[], bool]) -> None:
        with self._lock:
            self.stop_serving()
            self._agent.progress()  # a closed transport refuses here, not in the thread
            self._pump = Pump(self._name, self._agent.progress, active)

    def nudge(self) -> None:
        pump = self._pump
        if pump is not None:
            pump.nudge()

    def stop_serving(self) -> None:
        with self._lock:
            if self._pump is not None:
                self._pump.stop()
                self._pump = None

    def close(self) -> None:
        with self._lock:
            self.stop_serving()
            self._peers.clear()
            self._registered.clear()
            self._agent.destroy()
