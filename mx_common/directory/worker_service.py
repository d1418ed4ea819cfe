"""The control service that every source runs about its own memory: the tensor manifest, and leases for reading it.

    server = WorkerServer(build_manifest, leases, worker_id, host="10.0.0.5", port=9000)
    server.start()
    worker.worker_grpc_endpoint = server.endpoint
    server.mx_source_id = publisher.mx_source_id        # when the directory has assigned it

Invariant: a request that names another source or another worker is NOT_FOUND, so a reader that dials a port which another
process has taken over learns so before it reads a byte. Leases keep the memory; whoever frees it asks `leases` first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NoReturn

import grpc

from mx_common import envs
from mx_common.directory._rank_server import RankServer
from mx_common.directory.address import Address, host_towards
from mx_common.directory.leases import Leases
from mx_common.wire import p2p
from mx_common.wire.rpc import WORKER_SERVICE

__all__ = ["WorkerServer", "advertised_host", "worker_port"]

log = logging.getLogger(__name__)


def advertised_host(directory: str) -> str:
    """The host other nodes dial for this worker: `MX_ADVERTISE_HOST`, else this machine's address towards the directory."""
    return envs.ADVERTISE_HOST.get() or host_towards(Address.parse(directory, what="directory address"))


def worker_port(rank: int) -> int:
    """The port for the worker of `rank`: `MX_WORKER_PORT` plus the rank, or 0 (any free one) when that is unset."""
    first = envs.WORKER_PORT.get()
    return first + rank if first else 0


class WorkerServer(RankServer):
    """Serves WorkerService.

    `manifest` builds the answer to GetTensorManifest and may return the same message every time: the server stamps it in place
    with `mx_source_id` and `worker_id`. Requests are UNAVAILABLE until `mx_source_id` is set. `host` is where others dial: a
    loopback host is bound as it is, any other on all interfaces, since an advertised name need not be an address of this machine.
    """

    def __init__(
        self,
        manifest: Callable[[], p2p.GetTensorManifestResponse],
        leases: Leases,
        worker_id: str,
        *,
        mx_source_id: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.worker_id = worker_id
        self.mx_source_id = mx_source_id
        self._manifest = manifest
        self._leases = leases
        super().__init__(
            WORKER_SERVICE,
            host=host,
            port=port,
            what=f"the control service of worker {worker_id}",
            advice=f"set {envs.WORKER_PORT.name} to another range or to 0",
        )

    def GetTensorManifest(self, request: p2p.GetTensorManifestRequest, context: Any) -> p2p.GetTensorManifestResponse:
        self._check_named(request, context)
        return self._stamped_manifest()

    def PrepareTensorRead(self, request: p2p.PrepareTensorReadRequest, context: Any) -> p2p.PrepareTensorReadResponse:
        self._check_named(request, context)
        seconds = math.floor(self._leases.ttl)
        if request.lease_id:
            if not self._leases.renew(request.lease_id):
                _abort(
                    context, grpc.StatusCode.NOT_FOUND, f"lease {request.lease_id} has ended: stop reading, and prepare again"
                )
            return p2p.PrepareTensorReadResponse(lease_id=request.lease_id, lease_seconds=seconds)
        # older readers cannot renew: theirs has to last for a connection and a transfer, each within its own deadline
        unrenewed = max(self._leases.ttl, 2 * envs.TRANSFER_TIMEOUT.get())
        lease_id = self._leases.grant(None if request.renews else unrenewed)
        if lease_id is None:
            _abort(
                context, grpc.StatusCode.UNAVAILABLE, f"worker {self.worker_id} is about to release its memory: take another"
            )
        try:
            return p2p.PrepareTensorReadResponse(lease_id=lease_id, manifest=self._stamped_manifest(), lease_seconds=seconds)
        except BaseException:
            # a reader that got no answer knows no lease to release
            self._leases.release(lease_id)
            raise

    def ReleaseTensorRead(self, request: p2p.ReleaseTensorReadRequest, context: Any) -> p2p.ReleaseTensorReadResponse:
        self._check_named(request, context)
        self._leases.release(request.lease_id)
        return p2p.ReleaseTensorReadResponse()

    def _check_named(self, request: Any, context: Any) -> None:
        if not request.mx_source_id:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "mx_source_id is empty; name the source to be read")
        if not self.mx_source_id:
            _abort(context, grpc.StatusCode.UNAVAILABLE, f"worker {self.worker_id} is not registered yet: try again later")
        if request.mx_source_id != self.mx_source_id:
            _abort(context, grpc.StatusCode.NOT_FOUND, f"source {self.mx_source_id} answers here, not {request.mx_source_id}")
        if request.HasField("worker_id") and request.worker_id != self.worker_id:
            _abort(context, grpc.StatusCode.NOT_FOUND, f"worker {self.worker_id} answers here, not {request.worker_id!a}")

    def _stamped_manifest(self) -> p2p.GetTensorManifestResponse:
        manifest = self._manifest()
        manifest.mx_source_id = self.mx_source_id
        manifest.worker_id = self.worker_id
        return manifest


def _abort(context: Any, code: Any, message: str) -> NoReturn:
    context.abort(code, message)
    raise AssertionError("abort always raises")
