"""The directory as its clients see it: four calls with deadlines, retries, and errors that name the server.

    with DirectoryClient("10.0.0.5:8001") as directory:
        listing = directory.list_sources(identity, status=p2p.SOURCE_STATUS_READY)
        age_ms = (listing.server_time_ms or 0) - listing.instances[0].updated_at

Works with this pack's server and with a ModelExpress one; what only ours sends is None with the other.
Invariant: no call outlives its timeout (`MX_RPC_TIMEOUT` unless given), retries included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mx_common import envs
from mx_common.directory._call import Caller
from mx_common.directory._channel import open_channel
from mx_common.directory.address import Address
from mx_common.errors import DirectoryRefused
from mx_common.identity import Identity
from mx_common.wire import p2p
from mx_common.wire.identity import identity_to_proto
from mx_common.wire.rpc import P2P_SERVICE, unary_calls

__all__ = ["DirectoryClient", "Listing"]


@dataclass(frozen=True)
class Listing:
    """The sources that matched. `server_time_ms` is the directory's clock, None from a server that does not tell it."""

    instances: tuple[p2p.SourceInstanceRef, ...]
    server_time_ms: int | None


class DirectoryClient:
    """Calls one directory at `address` (`host:port`); safe to share between threads.

    Every call raises `DirectoryUnavailable` when nobody answers in `timeout` seconds and `DirectoryRefused` when the answer is
    no. The constructor raises `ConfigError` for a malformed address and dials nothing. `retry=False` makes one attempt a call,
    for callers that try again by themselves.
    """

    def __init__(self, address: str, *, timeout: float | None = None, retry: bool = True) -> None:
        parsed = Address.parse(address, what="directory address")
        self.address = str(parsed)
        self._timeout = timeout
        self._retry = retry
        self._channel = open_channel(parsed)
        self._caller = Caller(
            unary_calls(self._channel, P2P_SERVICE),
            peer=f"directory {self.address}",
            advice="check that it runs there, and that the address (MX_SERVER_ADDRESS or the setting `server`) is right",
        )

    def publish(self, identity: Identity, worker: p2p.WorkerMetadata, worker_id: str) -> str:
        """Register `worker`, or replace its record. Returns the `mx_source_id` that the server computed."""
        request = p2p.PublishMetadataRequest(identity=identity_to_proto(identity), worker=worker, worker_id=worker_id)
        response: p2p.PublishMetadataResponse = self._call("PublishMetadata", request)
        if not response.success:
            raise DirectoryRefused(f"directory {self.address} did not register worker {worker_id}: {response.message}")
        return response.mx_source_id

    def list_sources(
        self,
        identity: Identity | None = None,
        *,
        status: p2p.SourceStatus | None = None,
        model_name: str | None = None,
        worker_rank: int | None = None,
        min_training_step: int | None = None,
        min_updated_at: int | None = None,
        limit: int | None = None,
    ) -> Listing:
        """The workers for which every given filter holds. `min_updated_at`: ms since the epoch by the directory's clock."""
        request = p2p.ListSourcesRequest(
            identity=None if identity is None else identity_to_proto(identity),
            status_filter=status,
            model_name_filter=model_name,
            worker_rank_filter=worker_rank,
            min_training_step=min_training_step,
            min_updated_at=min_updated_at,
            limit=limit,
        )
        response: p2p.ListSourcesResponse = self._call("ListSources", request)
        return Listing(tuple(response.instances), response.server_time_ms or None)

    def get_metadata(self, mx_source_id: str, worker_id: str) -> p2p.GetMetadataResponse | None:
        """The full record of one worker with its identity, or None when the directory does not know it."""
        request = p2p.GetMetadataRequest(mx_source_id=mx_source_id, worker_id=worker_id)
        response: p2p.GetMetadataResponse = self._call("GetMetadata", request)
        return response if response.found else None

    def update_status(
        self,
        mx_source_id: str,
        worker_id: str,
        worker_rank: int,
        status: p2p.SourceStatus,
        source_load: float | None = None,
        *,
        reads_in_flight: int | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Send a heartbeat. False: the directory does not know this worker, publish it again.

        `source_load` in [0, 1]; None means no reading. `timeout` in seconds, the client's own unless given.
        """
        request = p2p.UpdateStatusRequest(
            mx_source_id=mx_source_id,
            worker_id=worker_id,
            worker_rank=worker_rank,
            status=status,
            source_load=source_load,
            reads_in_flight=reads_in_flight,
        )
        response: p2p.UpdateStatusResponse = self._call("UpdateStatus", request, timeout)
        return response.success

    def close(self) -> None:
        """Close the connection; calls in flight end with `DirectoryUnavailable`."""
        self._channel.close()

    def __enter__(self) -> DirectoryClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, name: str, request: object, timeout: float | None = None) -> Any:
        limit = timeout or self._timeout or envs.RPC_TIMEOUT.get()
        return self._caller.call(name, request, timeout=limit, retry=self._retry)
