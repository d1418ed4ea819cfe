"""The four calls of P2pService over a `Store`: what is refused, and how records and messages correspond.

    handler = service_handler(P2P_SERVICE, DirectoryService(store))

Invariants: nothing a client says about time is kept; every refusal is INVALID_ARGUMENT with a message that says what to send
instead; an unknown worker's heartbeat is answered `success=false`, which tells the source to register again.
"""

from __future__ import annotations

import math
from typing import Any

from mx_common.directory._requests import Refused, check_enums, check_names, on_store, refuse
from mx_common.directory.records import Heartbeat, Query, Record
from mx_common.directory.store import Store
from mx_common.errors import ConfigError
from mx_common.identity import mx_source_id
from mx_common.wire import p2p
from mx_common.wire.identity import identity_from_proto

__all__ = ["MAX_RECORD_BYTES", "DirectoryService"]

MAX_RECORD_BYTES = 64 << 20


class DirectoryService:
    """Coroutines named after the calls of P2pService, for a `grpc.aio` server."""

    def __init__(self, store: Store, *, max_record_bytes: int = MAX_RECORD_BYTES) -> None:
        self._store = store
        self._max_record_bytes = max_record_bytes

    async def PublishMetadata(self, request: p2p.PublishMetadataRequest, context: Any) -> p2p.PublishMetadataResponse:
        try:
            record = _record(request, self._max_record_bytes)
        except Refused as refusal:
            await refuse(context, "PublishMetadata", refusal)
        stored = await on_store(self._store, context, lambda: self._store.put(record))
        return p2p.PublishMetadataResponse(success=True, mx_source_id=stored.mx_source_id, worker_id=stored.worker_id)

    async def ListSources(self, request: p2p.ListSourcesRequest, context: Any) -> p2p.ListSourcesResponse:
        try:
            query = _query(request)
        except Refused as refusal:
            await refuse(context, "ListSources", refusal)
        records, now = await on_store(self._store, context, lambda: (self._store.list(query), self._store.now_ms()))
        return p2p.ListSourcesResponse(instances=map(_instance, records), server_time_ms=now)

    async def GetMetadata(self, request: p2p.GetMetadataRequest, context: Any) -> p2p.GetMetadataResponse:
        try:
            check_names(request, "mx_source_id", "worker_id")
        except Refused as refusal:
            await refuse(context, "GetMetadata", refusal)
        record = await on_store(self._store, context, lambda: self._store.get(request.mx_source_id, request.worker_id))
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
            check_names(request, "mx_source_id", "worker_id")
            check_enums(request, "status")
        except Refused as refusal:
            await refuse(context, "UpdateStatus", refusal)
        # a load that is not a number is no reading: it must not cost the source its heartbeat
        measured = request.HasField("source_load") and math.isfinite(request.source_load)
        heartbeat = Heartbeat(
            request.status,
            source_load=request.source_load if measured else None,
            reads_in_flight=request.reads_in_flight if request.HasField("reads_in_flight") else None,
        )
        known = await on_store(
            self._store, context, lambda: self._store.beat(request.mx_source_id, request.worker_id, heartbeat)
        )
        return p2p.UpdateStatusResponse(
            success=known,
            message="" if known else f"worker {request.worker_id!a} is not registered here: publish it again",
        )


def _record(request: p2p.PublishMetadataRequest, max_bytes: int) -> Record:
    if request.ByteSize() > max_bytes:
        raise Refused(
            f"{request.ByteSize()} bytes are more than the {max_bytes} a record may have; leave the tensors out and serve them "
            "from the worker's GetTensorManifest"
        )
    check_names(request, "worker_id")
    check_enums(request.worker, "status")
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
        check_enums(request, "status_filter")
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
    check_names(identity, "model_name")
    check_enums(identity, "mx_source_type", "backend_framework")
    try:
        return mx_source_id(identity_from_proto(identity))
    except ConfigError as error:
        raise Refused(f"identity: {error}") from error


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
