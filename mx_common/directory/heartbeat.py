"""Keeps one source known: registers it, says READY when the engine can serve, heartbeats its load, and survives the directory.

    publisher = SourcePublisher(identity, worker, worker_id, ready=engine_is_healthy, read_load=load.value)
    publisher.start()
    ...
    publisher.stop()                       # marks the source STALE; also done at exit and on SIGTERM, best effort

The thread registers again whenever the directory does not know the worker (it restarted empty, or another process took the
embedded one over), and takes over hosting the embedded directory itself when nobody else did. Invariants: a source is READY
only while `ready()` is true; a directory that is down costs one warning and never an exception in the engine.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable

from mx_common import envs, metrics
from mx_common.directory import embedded
from mx_common.directory._exit import ExitHook
from mx_common.directory.client import DirectoryClient
from mx_common.errors import ConfigError, DirectoryError
from mx_common.identity import Identity
from mx_common.wire import p2p

__all__ = ["SourcePublisher"]

log = logging.getLogger(__name__)

FAREWELL_SECONDS = 2.0
RECONNECT_SECONDS = 5.0


class SourcePublisher:
    """Publishes one worker of `identity`.

    `address`: the directory; None: `embedded.resolve()`, asked again after every failure. `ready` says whether the engine can
    serve, polled every `poll_seconds` until it is true and before each heartbeat from then on. `read_load` gives the load in
    [0, 1] or None for no reading. `reads_in_flight` gives the number of open read leases. `on_registered` is told each
    `mx_source_id` the directory assigns, before the source can be listed as READY. `interval`: seconds between heartbeats,
    `MX_HEARTBEAT_SECONDS` unless given.
    The callables run in the publisher's thread and have to return within seconds; what `ready` and `read_load` raise counts as
    "not ready" and "no reading".
    """

    def __init__(
        self,
        identity: Identity,
        worker: p2p.WorkerMetadata,
        worker_id: str,
        *,
        address: str | None = None,
        ready: Callable[[], bool] = lambda: True,
        read_load: Callable[[], float | None] = lambda: None,
        reads_in_flight: Callable[[], int] | None = None,
        on_registered: Callable[[str], None] | None = None,
        interval: float | None = None,
        poll_seconds: float = 0.5,
    ) -> None:
        self.worker_id = worker_id
        self._identity = identity
        self._worker = p2p.WorkerMetadata()
        self._worker.CopyFrom(worker)
        self._address = address
        self._ready = ready
        self._read_load = read_load
        self._reads_in_flight = reads_in_flight
        self._on_registered = on_registered
        self._interval = envs.HEARTBEAT_SECONDS.get() if interval is None else interval
        self._poll_seconds = min(poll_seconds, self._interval)
        if self._interval <= 0:
            raise ConfigError(f"a heartbeat every {self._interval:g} s is not possible; give seconds above 0")
        self._status: p2p.SourceStatus = p2p.SOURCE_STATUS_INITIALIZING
        self._mx_source_id = ""
        self._client: DirectoryClient | None = None
        self._down_since: float | None = None
        self._stop = threading.Event()
        self._published = threading.Event()
        self._sending = threading.Lock()
        self._complained: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="mx-heartbeat", daemon=True)
        self._hook: ExitHook | None = None

    @property
    def mx_source_id(self) -> str:
        """What the directory assigned; empty before the first registration."""
        return self._mx_source_id

    @property
    def status(self) -> p2p.SourceStatus:
        """What this source last told, or will tell, the directory."""
        return self._status

    def start(self) -> SourcePublisher:
        """Start the thread and return at once; call it in the main thread so that SIGTERM is seen."""
        metrics.serve(self._worker.worker_rank)
        self._hook = ExitHook(self._farewell)
        self._thread.start()
        return self

    def wait_ready(self, timeout: float) -> bool:
        """Whether the directory has taken this source as READY within `timeout` seconds."""
        return self._published.wait(timeout)

    def stop(self) -> None:
        """Mark the source STALE and end the thread; bounded by a few seconds even when the directory is down."""
        if self._hook is not None:
            self._hook.remove()
        self._farewell()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(FAREWELL_SECONDS)
        if self._client is not None:
            self._client.close()

    def __enter__(self) -> SourcePublisher:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            if time.monotonic() >= due:
                self._follow_engine()
                told = self._tell()
                # sources that came up together, or found a server back together, must not stay in step
                pause = self._interval if told else min(self._interval, RECONNECT_SECONDS)
                due = time.monotonic() + pause * random.uniform(0.8, 1.0)
            waiting = self._status == p2p.SOURCE_STATUS_INITIALIZING
            if waiting and self._engine_ready():
                self._status = p2p.SOURCE_STATUS_READY
                due = time.monotonic()
                continue
            pause = due - time.monotonic()
            self._stop.wait(max(min(pause, self._poll_seconds) if waiting else pause, 0.0))

    def _follow_engine(self) -> None:
        """A source whose engine stopped serving (its front end died, say) is STALE until it serves again."""
        if self._status == p2p.SOURCE_STATUS_INITIALIZING:
            return
        able = self._engine_ready()
        if able == (self._status == p2p.SOURCE_STATUS_READY):
            return
        self._status = p2p.SOURCE_STATUS_READY if able else p2p.SOURCE_STATUS_STALE
        if able:
            log.info("worker %s: its engine serves again, READY", self.worker_id)
        else:
            log.warning("worker %s: its engine cannot serve any more, STALE until it can", self.worker_id)

    def _tell(self) -> bool:
        """Register or heartbeat; whether the directory took it."""
        load, reads = self._load(), self._reads()
        with self._sending:
            if self._stop.is_set():
                return False
            try:
                self._register_or_beat(load, reads)
            except (DirectoryError, ConfigError) as error:
                metrics.HEARTBEATS.add(outcome="failed")
                self._lost(error)
                return False
        metrics.HEARTBEATS.add(outcome="sent")
        metrics.SOURCE_LOAD.set(load)
        metrics.SOURCE_READS.set(reads)
        if self._down_since is not None:
            log.info(
                "directory is back after %.1f s; worker %s is registered", time.monotonic() - self._down_since, self.worker_id
            )
            self._down_since = None
        if self._status == p2p.SOURCE_STATUS_READY and not self._published.is_set():
            log.info("worker %s is READY: other replicas may read from it", self.worker_id)
            self._published.set()
        return True

    def _register_or_beat(self, load: float | None, reads: int | None) -> None:
        client = self._connected()
        if not self._mx_source_id:
            self._register(client)
        rank, status = self._worker.worker_rank, self._status
        if client.update_status(self._mx_source_id, self.worker_id, rank, status, load, reads_in_flight=reads):
            return
        log.info("directory %s does not know worker %s: registering it again", client.address, self.worker_id)
        self._register(client)
        client.update_status(self._mx_source_id, self.worker_id, rank, status, load, reads_in_flight=reads)

    def _register(self, client: DirectoryClient) -> None:
        # never READY in the record itself: whoever lists it must find the control service already told its id
        self._worker.status = p2p.SOURCE_STATUS_INITIALIZING
        assigned = client.publish(self._identity, self._worker, self.worker_id)
        if assigned != self._mx_source_id:
            log.info("worker %s is registered with directory %s as source %s", self.worker_id, client.address, assigned)
        metrics.HEARTBEATS.add(outcome="registered_again" if self._mx_source_id else "registered")
        self._mx_source_id = assigned
        if self._on_registered is not None:
            self._on_registered(assigned)

    def _connected(self) -> DirectoryClient:
        if self._client is None:
            # the loop is the retry: a dead embedded server is to be replaced, not waited for
            self._client = DirectoryClient(embedded.resolve(self._address), retry=False)
        return self._client

    def _lost(self, error: Exception) -> None:
        # the next attempt resolves again: that is where another process, or this one, takes the embedded directory over
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._down_since is None and not self._stop.is_set():
            self._down_since = time.monotonic()
            log.warning("worker %s is not known to the directory for now, and keeps trying: %s", self.worker_id, error)

    def _farewell(self) -> None:
        """Tell the directory that this source ends. One short attempt; raises nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        # the thread may hold the lock in a call to a dead server; the reaper then does what we could not
        if not self._sending.acquire(timeout=FAREWELL_SECONDS):
            return
        try:
            self._status = p2p.SOURCE_STATUS_STALE
            if self._client is not None and self._mx_source_id:
                rank = self._worker.worker_rank
                self._client.update_status(self._mx_source_id, self.worker_id, rank, self._status, timeout=FAREWELL_SECONDS)
        except DirectoryError as error:
            log.debug("could not mark worker %s STALE: %s", self.worker_id, error)
        finally:
            self._sending.release()

    def _engine_ready(self) -> bool:
        try:
            return bool(self._ready())
        except Exception as error:
            # the callable is the engine's: whatever it raises while starting means that it is not ready
            self._complain("ready", error)
            return False

    def _load(self) -> float | None:
        try:
            load = self._read_load()
        except Exception as error:
            # a provider of telemetry must never cost the source its heartbeat
            self._complain("read_load", error)
            return None
        return load if load is not None and math.isfinite(load) else None

    def _reads(self) -> int | None:
        return None if self._reads_in_flight is None else self._reads_in_flight()

    def _complain(self, name: str, error: Exception) -> None:
        if name not in self._complained:
            self._complained.add(name)
            log.warning("%s of worker %s failed, and is treated as no answer: %s", name, self.worker_id, error)
