"""A reader's side of a worker's control service: the manifest, and a lease that is renewed while bytes move.

    with WorkerClient("10.0.0.5:9000", mx_source_id, worker_id) as worker:
        with LeaseKeeper(worker) as lease:
            read(lease.manifest)
            lease.check()                  # raises SourceLost when the source may have released its memory

Peers without leases (older ones) are read by their manifest alone. Invariant: whatever answers for another source, another
worker, or not at all is `SourceLost`, named by its endpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import grpc

from mx_common import envs
from mx_common.directory._channel import open_channel
from mx_common.directory.address import Address
from mx_common.errors import MxError, SourceLost
from mx_common.wire import p2p
from mx_common.wire.rpc import WORKER_SERVICE, unary_calls

__all__ = ["LeaseKeeper", "WorkerClient"]

log = logging.getLogger(__name__)

RENEWALS_PER_TTL = 3
# nobody waits for long to tell a stopped source that it may free its memory
RELEASE_SECONDS = 2.0


class WorkerClient:
    """Calls the worker `worker_id` of `mx_source_id` at `endpoint` (`host:port`).

    Each call takes at most `timeout` seconds (`MX_RPC_TIMEOUT` unless given) and raises `SourceLost` when nobody answers, when
    another source or worker does, or when it refuses. An empty `worker_id` checks the source only. The constructor raises
    `ConfigError` for a malformed endpoint and dials nothing.
    """

    def __init__(self, endpoint: str, mx_source_id: str, worker_id: str = "", *, timeout: float | None = None) -> None:
        address = Address.parse(endpoint, what="worker endpoint")
        self.endpoint = str(address)
        self.mx_source_id = mx_source_id
        self.worker_id = worker_id
        self._timeout = timeout
        self._channel = open_channel(address)
        self._calls = unary_calls(self._channel, WORKER_SERVICE)

    def get_manifest(self) -> p2p.GetTensorManifestResponse:
        """The worker's tensors."""
        request = p2p.GetTensorManifestRequest(mx_source_id=self.mx_source_id, worker_id=self.worker_id or None)
        manifest: p2p.GetTensorManifestResponse = self._call("GetTensorManifest", request)
        self._check(manifest)
        return manifest

    def prepare_read(self) -> p2p.PrepareTensorReadResponse:
        """A lease and the manifest. A peer without leases gives an empty `lease_id` and the manifest."""
        request = p2p.PrepareTensorReadRequest(mx_source_id=self.mx_source_id, worker_id=self.worker_id or None, renews=True)
        response: p2p.PrepareTensorReadResponse | None = self._call("PrepareTensorRead", request, optional=True)
        if response is None:
            return p2p.PrepareTensorReadResponse(manifest=self.get_manifest())
        self._check(response.manifest)
        return response

    def renew(self, lease_id: str, *, timeout: float | None = None) -> str:
        """Let the lease live on; returns the id that holds from now on (another one with peers that can only grant)."""
        request = p2p.PrepareTensorReadRequest(
            mx_source_id=self.mx_source_id, worker_id=self.worker_id or None, lease_id=lease_id
        )
        response: p2p.PrepareTensorReadResponse = self._call("PrepareTensorRead", request, timeout=timeout)
        if response.lease_id != lease_id:
            self.release(lease_id)
        return response.lease_id

    def release(self, lease_id: str) -> None:
        """End the lease. A peer that has forgotten it, or is gone, holds nothing for us: that is no error."""
        request = p2p.ReleaseTensorReadRequest(
            mx_source_id=self.mx_source_id, worker_id=self.worker_id or None, lease_id=lease_id
        )
        try:
            self._call("ReleaseTensorRead", request, timeout=RELEASE_SECONDS)
        except SourceLost as error:
            log.debug("lease %s was not released, it expires by itself: %s", lease_id, error)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> WorkerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, name: str, request: object, *, optional: bool = False, timeout: float | None = None) -> Any:
        started = time.monotonic()
        try:
            return self._calls[name](request, timeout=timeout or self._timeout or envs.RPC_TIMEOUT.get())
        except grpc.RpcError as error:
            if optional and error.code() == grpc.StatusCode.UNIMPLEMENTED:
                return None
            seconds = time.monotonic() - started
            raise SourceLost(
                f"{name} at {self.endpoint} for source {self.mx_source_id} worker {self.worker_id or '(any)'} failed after "
                f"{seconds:.1f} s ({error.code().name}: {error.details() or 'no details'}); take another source"
            ) from error

    def _check(self, manifest: p2p.GetTensorManifestResponse) -> None:
        # older peers do not check who was asked for, so the answer is checked as well
        if manifest.mx_source_id not in ("", self.mx_source_id):
            raise SourceLost(f"source {manifest.mx_source_id} answers at {self.endpoint}, not {self.mx_source_id}")
        if self.worker_id and manifest.worker_id not in ("", self.worker_id):
            raise SourceLost(f"worker {manifest.worker_id} answers at {self.endpoint}, not {self.worker_id}")


class LeaseKeeper:
    """Holds a lease: takes it on entry, renews it at a third of its life in a thread, always releases it on exit.

    With a peer that has no leases it holds none, and `check` never fails. `manifest` is the source's, as of the grant.
    """

    def __init__(self, worker: WorkerClient) -> None:
        self._worker = worker
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._lease_id = ""
        self._seconds = 0.0
        self._good_until = float("inf")
        self._lost: MxError | None = None
        self._thread: threading.Thread | None = None
        self.manifest = p2p.GetTensorManifestResponse()

    def __enter__(self) -> LeaseKeeper:
        asked = time.monotonic()
        response = self._worker.prepare_read()
        self.manifest = response.manifest
        self._lease_id = response.lease_id
        if self._lease_id:
            self._seconds = response.lease_seconds or envs.LEASE_SECONDS.get()
            self._good_until = asked + self._seconds
            self._thread = threading.Thread(target=self._renew, name="mx-lease", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        # a renewal under way may be about to change the id
        with self._lock:
            if self._lease_id:
                self._worker.release(self._lease_id)
                self._lease_id = ""

    @property
    def lease_id(self) -> str:
        """The lease that is held now; empty with a peer that has none."""
        return self._lease_id

    def check(self) -> None:
        """Raise `SourceLost` when the lease has ended, or may have: what was read since then may not be used.

        Asks the source itself: one that has closed, or revoked the lease, may have given its memory to something else.
        """
        with self._lock:
            if self._lease_id and self._lost is None:
                asked = time.monotonic()
                try:
                    self._lease_id = self._worker.renew(self._lease_id)
                    self._good_until = asked + self._seconds
                except SourceLost as error:
                    self._lost = error
        if self._lost is not None or time.monotonic() >= self._good_until:
            because = f": {self._lost}" if self._lost is not None else ""
            raise SourceLost(
                f"the read lease at {self._worker.endpoint} was not renewed within its {self._seconds:g} s{because}; "
                "drop what was read and take another source"
            ) from self._lost

    def _renew(self) -> None:
        while not self._stop.wait(self._seconds / RENEWALS_PER_TTL):
            with self._lock:
                if self._stop.is_set():
                    return
                asked = time.monotonic()
                try:
                    self._lease_id = self._worker.renew(self._lease_id, timeout=self._seconds / RENEWALS_PER_TTL)
                except SourceLost as error:
                    if time.monotonic() >= self._good_until or _has_ended(error):
                        self._lost = error
                        return
                    log.warning("a read lease was not renewed, trying again: %s", error)
                else:
                    self._good_until = asked + self._seconds


def _has_ended(error: SourceLost) -> bool:
    cause: Any = error.__cause__
    return isinstance(cause, grpc.RpcError) and cause.code() == grpc.StatusCode.NOT_FOUND
