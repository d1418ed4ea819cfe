"""A reader's lease on a version of weights, renewed while bytes move. Made by `RefitClient.lease`.

    with client.lease(uid, "engine-0") as lease:
        read(...)
        lease.check()                      # raises SourceLost when the publisher may have overwritten what was read

Invariant: `check` returns only while the directory holds the lease, or while its time, counted from before it was last asked, is not up.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import grpc

from mx_common.directory._call import Caller
from mx_common.errors import DirectoryError, DirectoryRefused, MxError, SourceLost
from mx_common.wire import refit, refit_ext

__all__ = ["LeaseCalls", "VersionLease", "said_by", "status_of"]

log = logging.getLogger(__name__)

RENEWALS_PER_TTL = 3
RELEASE_SECONDS = 2.0
GONE = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)


def status_of(error: DirectoryError) -> Any:
    """The gRPC status behind an error of a `Caller`; None when there was no answer to have one."""
    cause: Any = error.__cause__
    return cause.code() if isinstance(cause, grpc.RpcError) else None


def said_by(error: DirectoryError) -> str:
    """What the server said, without the story of the call; that story when there was no answer."""
    cause: Any = error.__cause__
    return str((isinstance(cause, grpc.RpcError) and cause.details()) or error)


class LeaseCalls:
    """The calls about leases; `renew` also works with servers that have none of its own, by registering once more."""

    def __init__(self, caller: Caller, timeout: float) -> None:
        self._caller = caller
        self.timeout = timeout
        self._renewable = True

    def register(self, uid: str, worker_id: str, ttl: int) -> refit.VersionLease:
        """A lease. Raises `SourceLost` when the version cannot be read (any more)."""
        request = refit.RegisterVersionLeaseRequest(version_id=uid, worker_id=worker_id, ttl_seconds=ttl)
        return self._asked("RegisterVersionLease", request, self.timeout, True)

    def renew(self, uid: str, lease_id: str, worker_id: str, ttl: int, *, timeout: float, retry: bool) -> refit.VersionLease:
        """The lease as it holds from now on. Raises `SourceLost` when it has ended."""
        if self._renewable:
            request = refit_ext.RenewLeaseRequest(version_id=uid, lease_id=lease_id, worker_id=worker_id, ttl_seconds=ttl)
            try:
                return self._asked("RenewLease", request, timeout, retry)
            except DirectoryRefused as error:
                if status_of(error) != grpc.StatusCode.UNIMPLEMENTED:
                    raise
                self._renewable = False
        again = refit.RegisterVersionLeaseRequest(version_id=uid, worker_id=worker_id, ttl_seconds=ttl)
        lease = self._asked("RegisterVersionLease", again, timeout, retry)
        if lease.lease_id != lease_id:
            self.release(uid, lease_id, worker_id)
        return lease

    def release(self, uid: str, lease_id: str, worker_id: str) -> None:
        """End a lease. A directory that is gone or has forgotten it holds nothing for us: that is no error."""
        request = refit.DeleteVersionLeaseRequest(version_id=uid, lease_id=lease_id, worker_id=worker_id)
        try:
            self._caller.call("DeleteVersionLease", request, timeout=RELEASE_SECONDS, retry=False)
        except DirectoryError as error:
            log.debug("lease %s was not released, it expires by itself: %s", lease_id, error)

    def _asked(self, name: str, request: Any, timeout: float, retry: bool) -> refit.VersionLease:
        try:
            lease: refit.VersionLease = self._caller.call(name, request, timeout=timeout, retry=retry).lease
        except DirectoryRefused as error:
            if status_of(error) in GONE:
                raise SourceLost(f"version {request.version_id} cannot be read: {said_by(error)}") from error
            raise
        return lease


class VersionLease:
    """Takes the lease on entry, renews it at a third of its life in a thread, always releases it on exit. `ttl`: whole seconds."""

    def __init__(self, calls: LeaseCalls, uid: str, worker_id: str, ttl: int) -> None:
        self.uid = uid
        self.worker_id = worker_id
        self._calls = calls
        self._ttl = ttl
        self._stop = threading.Event()
        self._lease_id = ""
        self._seconds = float(ttl)
        self._good_until = 0.0
        self._lost: MxError | None = None
        self._thread: threading.Thread | None = None

    @property
    def lease_id(self) -> str:
        """The lease that is held now; empty before entry and after exit."""
        return self._lease_id

    def __enter__(self) -> VersionLease:
        asked = time.monotonic()
        self._took(self._calls.register(self.uid, self.worker_id, self._ttl), asked)
        self._thread = threading.Thread(target=self._keep, name="mx-version-lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._calls.release(self.uid, self._lease_id, self.worker_id)
        self._lease_id = ""
        if self._thread is not None:
            self._thread.join(RELEASE_SECONDS)

    def check(self) -> None:
        """Raise `SourceLost` when the lease has ended, or may have: what was read since then may not be used.

        Asks the directory; one that is away is not waited for, and the lease then holds by its time.
        """
        left = self._good_until - time.monotonic()
        if self._lost is None and left > 0 and not self._stop.is_set():
            try:
                self._renew(min(left, self._calls.timeout), retry=False)
            except SourceLost as error:
                self._lost = error
            except DirectoryError as error:
                log.debug("the directory was not asked about a lease that holds by its time: %s", error)
        if self._lost is not None or time.monotonic() >= self._good_until:
            because = self._lost or "nobody renewed it"
            raise SourceLost(
                f"version {self.uid} was released while {self.worker_id} read it, or may have been: its lease of {self._seconds:g} s does "
                f"not hold any more ({because}); drop what was read and take the latest version"
            ) from self._lost

    def _keep(self) -> None:
        while not self._stop.wait(self._seconds / RENEWALS_PER_TTL):
            try:
                self._renew(self._seconds / RENEWALS_PER_TTL, retry=True)
            except SourceLost as error:
                self._lost = error
                return
            except DirectoryError as error:
                if time.monotonic() >= self._good_until:
                    self._lost = error
                    return
                log.warning("the lease on version %s was not renewed, trying again: %s", self.uid, error)

    def _renew(self, timeout: float, *, retry: bool) -> None:
        asked = time.monotonic()
        lease = self._calls.renew(self.uid, self._lease_id, self.worker_id, self._ttl, timeout=timeout, retry=retry)
        if self._stop.is_set():
            # the reader has left meanwhile, and a server without renewals has granted another lease
            self._calls.release(self.uid, lease.lease_id, self.worker_id)
            return
        self._took(lease, asked)

    def _took(self, lease: refit.VersionLease, asked: float) -> None:
        self._lease_id = lease.lease_id
        self._seconds = float(lease.ttl_seconds or self._ttl)
        self._good_until = max(self._good_until, asked + self._seconds)
