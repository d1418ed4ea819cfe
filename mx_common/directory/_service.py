"""The four calls of P2pService over a `Store`: what is refused, and how records and messages correspond.

    handler = service_handler(P2P_SERVICE, DirectoryService(store))

Invariants: nothing a client says about time is kept; every refusal is INVALID_ARGUMENT with a message that says what to send
instead; an unknown worker's heartbeat is answered `success=false`, which tells the source to register again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import grpc

from mx_common.directory.records import Heartbeat, Query, Record
from mx_common.directory.store import Store
from mx_common.errors import ConfigError, DirectoryUnavailable
from mx_common.identity import mx_source_id
from mx_common.wire import p2p
from mx_common.wire.identity import identity_from_proto

__all__ = ["MAX_RECORD_BYTES", "DirectoryService", "unknown_value"]

MAX_RECORD_BYTES = 64 << 20
MAX_NAME_BYTES = 4096

T = TypeVar("T")


class _Refused(Exception):
    """A request that cannot be served; the message goes to the client."""


class DirectoryService:
    """Coroutines named after the calls of P2pService, for a `grpc.aio` server."""

    def __init__(self, store: Store, *, max_record_bytes: int = MAX_RECORD_BYTES) -> None:
        self._store = store
        self._max_record_bytes = max_record_bytes

    async def PublishMetadata(self, request: p2p.PublishMetadataRequest, context: Any) -> p2p.PublishMetadataResponse:
        try:
            record = _record(request, self._max_record_bytes)
        except _Refused as refusal:
            await _abort(context, "PublishMetadata", refusal)
        stored = await self._run(context, lambda: self._store.put(record))
        return p2p.PublishMetadataResponse(success=True, mx_source_id=stored.mx_source_id, worker_id=stored.worker_id)

    async def ListSources(self, request: p2p.ListSourcesRequest, context: Any) -> p2p.ListSourcesResponse:
        try:
            query = _query(request)
        except _Refused as refusal:
            await _abort(context, "ListSources", refusal)
        records, now = await self._run(context, lambda: (self._store.list(query), self._store.now_ms()))
        return p2p.ListSourcesResponse(instances=map(_instance, records), server_time_ms=now)

    async def GetMetadata(self, request: p2p.GetMetadataRequest, context: Any) -> p2p.GetMetadataResponse:
        try:
            _names(request, "mx_source_id", "worker_id")
        except _Refused as refusal:
            await _abort(context, "GetMetadata", refusal)
        record = await self._run(context, lambda: self._store.get(request.mx_source_id, request.worker_id))
        response = p2p.GetMetadataResponse(
            found=record is not None, mx_source_id=request.mx_source_id, worker_id=request.worker_id
        )
        if record is not None:
            response.worker.ParseFromString(record.worker)
            response.worker.status = record.status
            response.worker.updated_at = record.updated_at
            response.identity.ParseFromString(record.identity)
        return response

    async def UpdateStatus(self, request: p2p.UpdateStatusRequest, context: Any) -> p2p.UpdateStatusResponse:
        try:
            _names(request, "mx_source_id", "worker_id")
            _enums(request, "status")
        except _Refused as refusal:
            await _abort(context, "UpdateStatus", refusal)
        # a load that is not a number is no reading: it must not cost the source its heartbeat
        measured = request.HasField("source_load") and math.isfinite(request.source_load)
        heartbeat = Heartbeat(
            request.status,
            source_load=request.source_load if measured else None,
            reads_in_flight=request.reads_in_flight if request.HasField("reads_in_flight") else None,
        )
        known = await self._run(context, lambda: self._store.beat(request.mx_source_id, request.worker_id, heartbeat))
        return p2p.UpdateStatusResponse(
            success=known,
            message="" if known else f"worker {request.worker_id!a} is not registered here: publish it again",
        )

    async def _run(self, context: Any, call: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(call) if self._store.blocking else call()
        except DirectoryUnavailable as error:
            # the client may try again, here or at a server beside this one
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise


async def _abort(context: Any, call: str, refusal: _Refused) -> NoReturn:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{call}: {refusal}")
    raise AssertionError("abort always raises")


def _record(request: p2p.PublishMetadataRequest, max_bytes: int) -> Record:
    if request.ByteSize() > max_bytes:
        raise _Refused(
            f"{request.ByteSize()} bytes are more than the {max_bytes} a record may have; leave the tensors out and serve them "
            "from the worker's GetTensorManifest"
        )
    _names(request, "worker_id")
    _enums(request.worker, "status")
    identity, worker, extra = request.identity, request.worker, request.identity.extra_parameters
    step = extra.get("training_step", "")
    return Record(
        mx_source_id=_source_id(identity),
        worker_id=request.worker_id,
        model_name=identity.model_name,
        worker_rank=worker.worker_rank,
        identity=identity.SerializeToString(),
        worker=worker.SerializeToString(),
        status=worker.status,
        updated_at=0,
        accelerator=worker.accelerator,
        topology=dict(worker.topology),
        training_step=int(step) if step.isascii() and step.isdigit() and int(step) < 1 << 64 else None,
        layout_signature=extra.get("layout_signature"),
    )


def _query(request: p2p.ListSourcesRequest) -> Query:
    def given(name: str) -> Any:
        return getattr(request, name) if request.HasField(name) else None

    if request.HasField("status_filter"):
        _enums(request, "status_filter")
    wanted = None
    if request.HasField("identity"):
        wanted = _source_id(request.identity)
    return Query(
        mx_source_id=wanted,
        status=given("status_filter"),
        model_name=given("model_name_filter"),
        worker_rank=given("worker_rank_filter"),
        min_training_step=given("min_training_step"),
        min_updated_at=given("min_updated_at"),
        limit=request.limit,
    )


def _source_id(identity: p2p.SourceIdentity) -> str:
    _names(identity, "model_name")
    _enums(identity, "mx_source_type", "backend_framework")
    try:
        return mx_source_id(identity_from_proto(identity))
    except ConfigError as error:
        raise _Refused(f"identity: {error}") from error


def _instance(record: Record) -> p2p.SourceInstanceRef:
    return p2p.SourceInstanceRef(
        mx_source_id=record.mx_source_id,
        worker_id=record.worker_id,
        model_name=record.model_name,
        worker_rank=record.worker_rank,
        accelerator=record.accelerator,
        updated_at=record.updated_at,
        training_step=record.training_step,
        layout_signature=record.layout_signature,
        topology=record.topology,
        source_load=record.source_load,
        reads_in_flight=record.reads_in_flight,
        status=record.status,
    )


def _names(message: Any, *fields: str) -> None:
    for field in fields:
        size = len(getattr(message, field).encode())
        if not size:
            raise _Refused(f"{field} is empty; it has to name something")
        if size > MAX_NAME_BYTES:
            raise _Refused(f"{field} has {size} bytes; at most {MAX_NAME_BYTES} are allowed")


def _enums(message: Any, *fields: str) -> None:
    for field in fields:
        if problem := unknown_value(message, field):
            raise _Refused(problem)


def unknown_value(message: Any, field: str) -> str:
    """Why the number in an enum field of a request cannot be used; "" when it can."""
    known = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number
    value = getattr(message, field)
    if value in known:
        return ""
    names = ", ".join(f"{number} {member.name}" for number, member in sorted(known.items()))
    return f"{field}={value} is not known here; known are {names}"
