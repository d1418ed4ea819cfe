"""The calls of RefitService and of our VersionService over a `VersionStore`: what is refused, and how records and messages correspond.

    service = RefitService(versions)
    handlers = (service_handler(REFIT_SERVICE, service), service_handler(VERSION_SERVICE, service))

Invariants: a malformed request is INVALID_ARGUMENT, one that the state of a version forbids FAILED_PRECONDITION, one about something
that is gone NOT_FOUND; each says why, and what to do instead.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import grpc

from mx_common.directory._requests import unknown_value
from mx_common.directory._version_records import Kind
from mx_common.directory.versions import Lease, Refusal, Shard, State, Version, VersionSpec, VersionStore
from mx_common.errors import ConfigError
from mx_common.wire import refit, refit_ext

__all__ = ["RefitService"]

log = logging.getLogger(__name__)

_CODES: dict[Kind, Any] = {
    "unknown": grpc.StatusCode.NOT_FOUND,
    "exists": grpc.StatusCode.ALREADY_EXISTS,
    "state": grpc.StatusCode.FAILED_PRECONDITION,
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "full": grpc.StatusCode.RESOURCE_EXHAUSTED,
}

Request = TypeVar("Request")
Response = TypeVar("Response")


def _call(method: Callable[[Any, Request], Response]) -> Callable[[Any, Request, Any], Coroutine[Any, Any, Response]]:
    """`method` as a coroutine of a `grpc.aio` server, with refusals as status codes."""

    @functools.wraps(method)
    async def answer(self: Any, request: Request, context: Any) -> Response:
        try:
            return method(self, request)
        except Refusal as refusal:
            code, said = _CODES[refusal.kind], str(refusal)
        except ConfigError as error:
            code, said = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        await context.abort(code, f"{method.__name__}: {said}")
        raise AssertionError("abort always raises")

    return answer


class RefitService:
    """Coroutines named after the calls of both services, for a `grpc.aio` server.

    `shared`: several servers share one store of sources; versions stay with the server that they were made at, and the first one
    made says so in the log.
    """

    def __init__(self, versions: VersionStore, *, shared: bool = False) -> None:
        self._versions = versions
        self._to_warn = shared

    # RefitService -------------------------------------------------------------------------------------------------------

    @_call
    def CreateWeightVersion(self, request: refit.CreateWeightVersionRequest) -> refit.CreateWeightVersionResponse:
        version = self._versions.create(_spec(request))
        if self._to_warn:
            self._to_warn = False
            log.warning(
                "versions of trained weights lie in this server's memory: trainers and engines that use another server of the same "
                "store do not see them; give all of them this server's address"
            )
        return refit.CreateWeightVersionResponse(version=_version(version))

    @_call
    def GetWeightVersion(self, request: refit.GetWeightVersionRequest) -> refit.GetWeightVersionResponse:
        return refit.GetWeightVersionResponse(version=_version(self._versions.get(request.uid)))

    @_call
    def DeleteWeightVersion(self, request: refit.DeleteWeightVersionRequest) -> refit.DeleteWeightVersionResponse:
        return refit.DeleteWeightVersionResponse(version=_version(self._versions.delete(request.uid)))

    @_call
    def UpdateWeightVersionState(
        self, request: refit.UpdateWeightVersionStateRequest
    ) -> refit.UpdateWeightVersionStateResponse:
        updated = self._versions.update_state(request.uid, _state(request.state))
        return refit.UpdateWeightVersionStateResponse(version=_version(updated))

    @_call
    def RegisterWorker(self, request: refit.RegisterWorkerRequest) -> refit.RegisterWorkerResponse:
        worker = request.worker
        _named(worker, "worker_id", "model_name")
        _known(worker, "role")
        until_ms = self._versions.register(worker.worker_id, worker.model_name, request.ttl_seconds)
        registered = refit.WorkerRegistration(
            worker_id=worker.worker_id, role=worker.role, model_name=worker.model_name, expires_at_unix_ms=until_ms
        )
        return refit.RegisterWorkerResponse(worker=registered)

    @_call
    def CreateWeightVersionShard(
        self, request: refit.CreateWeightVersionShardRequest
    ) -> refit.CreateWeightVersionShardResponse:
        version = self._versions.add_shard(shard_from_proto(request.shard))
        return refit.CreateWeightVersionShardResponse(shard=request.shard, version=_version(version))

    @_call
    def ListWeightVersionShards(self, request: refit.ListWeightVersionShardsRequest) -> refit.ListWeightVersionShardsResponse:
        shards = self._versions.get(request.version_id).shards
        return refit.ListWeightVersionShardsResponse(shards=map(shard_to_proto, shards))

    @_call
    def DeleteWeightVersionShard(
        self, request: refit.DeleteWeightVersionShardRequest
    ) -> refit.DeleteWeightVersionShardResponse:
        deleted = self._versions.remove_shard(request.version_id, request.source_slot_id, request.worker_id)
        return refit.DeleteWeightVersionShardResponse(deleted=deleted)

    @_call
    def RegisterVersionLease(self, request: refit.RegisterVersionLeaseRequest) -> refit.RegisterVersionLeaseResponse:
        lease = self._versions.lease(request.version_id, request.worker_id, request.ttl_seconds)
        return refit.RegisterVersionLeaseResponse(lease=_lease(lease))

    @_call
    def DeleteVersionLease(self, request: refit.DeleteVersionLeaseRequest) -> refit.DeleteVersionLeaseResponse:
        deleted = self._versions.release(request.version_id, request.lease_id, request.worker_id)
        return refit.DeleteVersionLeaseResponse(deleted=deleted)

    # VersionService -----------------------------------------------------------------------------------------------------

    @_call
    def ListVersions(self, request: refit_ext.ListVersionsRequest) -> refit_ext.ListVersionsResponse:
        if request.uid:
            found = [self._versions.get(request.uid)]
        elif request.model_name:
            found = self._versions.versions_of(request.model_name)
        else:
            found = self._versions.all_versions()
        return refit_ext.ListVersionsResponse(versions=map(_summary, found), server_time_ms=self._versions.now_ms())

    @_call
    def LatestVersion(self, request: refit_ext.LatestVersionRequest) -> refit_ext.LatestVersionResponse:
        _named(request, "model_name")
        least = _state(request.min_state or State.READY)
        if least == State.RELEASING:
            raise ConfigError("min_state=3 RELEASING: nobody can begin to read such a version; ask for READY")
        found = self._versions.latest(request.model_name, least)
        return refit_ext.LatestVersionResponse(version=None if found is None else _summary(found))

    @_call
    def RenewLease(self, request: refit_ext.RenewLeaseRequest) -> refit_ext.RenewLeaseResponse:
        renewed = self._versions.renew(request.version_id, request.lease_id, request.worker_id, request.ttl_seconds)
        return refit_ext.RenewLeaseResponse(lease=_lease(renewed))

    @_call
    def RevokeLeases(self, request: refit_ext.RevokeLeasesRequest) -> refit_ext.RevokeLeasesResponse:
        return refit_ext.RevokeLeasesResponse(revoked=self._versions.revoke(request.version_id))


def shard_from_proto(message: refit.WeightVersionShard) -> Shard:
    """The record in `message`. Raises `ConfigError` for one that no reader could ask for."""
    return Shard(
        version_id=message.version_id,
        slot=message.source_slot_id,
        worker_id=message.worker_id,
        manifest_digest=message.manifest_digest,
        manifest_endpoint=message.manifest_endpoint,
        tensor_count=message.tensor_count,
        total_bytes=message.total_bytes,
        layout_signature=message.layout_signature,
    )


def shard_to_proto(shard: Shard) -> refit.WeightVersionShard:
    """The message for `shard`."""
    return refit.WeightVersionShard(
        version_id=shard.version_id,
        source_slot_id=shard.slot,
        worker_id=shard.worker_id,
        tensor_count=shard.tensor_count,
        total_bytes=shard.total_bytes,
        manifest_digest=shard.manifest_digest,
        manifest_endpoint=shard.manifest_endpoint,
        layout_signature=shard.layout_signature,
    )


def _spec(request: refit.CreateWeightVersionRequest) -> VersionSpec:
    _known(request, "payload_format", "state")
    if request.state == refit.WEIGHT_VERSION_STATE_RELEASING:
        raise ConfigError("state=3 RELEASING: a version is made STAGING, or READY when it lies in object storage")
    storage = None
    if request.HasField("object_storage"):
        _named(request.object_storage, "uri")
        _known(request.object_storage, "storage_type")
        storage = (request.object_storage.uri, int(request.object_storage.storage_type))
    if request.HasField("uid"):
        _named(request, "uid")
    return VersionSpec(
        model_name=request.model_name,
        slots=tuple(request.expected_source_slots),
        number=request.number if request.HasField("number") else None,
        run=request.run,
        uid=request.uid,
        idempotency_key=request.idempotency_key,
        payload_format=request.payload_format,
        base_version_id=request.base_version_id if request.HasField("base_version_id") else None,
        object_storage=storage,
        ready=request.state == refit.WEIGHT_VERSION_STATE_READY,
    )


def _version(version: Version) -> refit.WeightVersion:
    spec = version.spec
    message = refit.WeightVersion(
        uid=version.uid,
        model_name=spec.model_name,
        idempotency_key=spec.idempotency_key,
        payload_format=spec.payload_format,  # type: ignore[arg-type]
        base_version_id=spec.base_version_id,
        expected_source_slots=spec.slots,
        layout_signature=version.layout_signature,
        state=int(version.state),  # type: ignore[arg-type]
        created_at_unix_ms=version.created_at_ms,
        number=version.number,
        run=spec.run,
    )
    if spec.object_storage is not None:
        message.object_storage.uri = spec.object_storage[0]
        message.object_storage.storage_type = spec.object_storage[1]  # type: ignore[assignment]
    return message


def _summary(version: Version) -> refit_ext.VersionSummary:
    return refit_ext.VersionSummary(
        version=_version(version), open_leases=version.open_leases, missing_slots=version.missing, order=version.order
    )


def _lease(lease: Lease) -> refit.VersionLease:
    return refit.VersionLease(
        lease_id=lease.lease_id,
        version_id=lease.version_id,
        worker_id=lease.worker_id,
        expires_at_unix_ms=lease.until_ms,
        ttl_seconds=lease.ttl,
    )


def _state(value: int) -> State:
    try:
        return State(value)
    except ValueError as error:
        known = ", ".join(f"{state.value} {state.name}" for state in State)
        raise ConfigError(f"state={value} is not a state that a version can be in; known are {known}") from error


def _named(message: Any, *fields: str) -> None:
    for name in fields:
        if not getattr(message, name):
            raise ConfigError(f"{name} is empty; it has to name something")


def _known(message: Any, *fields: str) -> None:
    for name in fields:
        if problem := unknown_value(message, name):
            raise ConfigError(problem)
