# Types of refit_ext.proto. Made by `python scripts/generate_wire.py`; do not edit.
# ruff: noqa
# fmt: off
# mypy: disable-error-code="type-arg"
from mx_common.wire import refit as _refit_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VersionSummary(_message.Message):
    __slots__ = ("version", "open_leases", "missing_slots", "order")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OPEN_LEASES_FIELD_NUMBER: _ClassVar[int]
    MISSING_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    version: _refit_pb2.WeightVersion
    open_leases: int
    missing_slots: _containers.RepeatedScalarFieldContainer[str]
    order: int
    def __init__(self, version: _Optional[_Union[_refit_pb2.WeightVersion, _Mapping]] = ..., open_leases: _Optional[int] = ..., missing_slots: _Optional[_Iterable[str]] = ..., order: _Optional[int] = ...) -> None: ...

class ListVersionsRequest(_message.Message):
    __slots__ = ("model_name", "uid")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    uid: str
    def __init__(self, model_name: _Optional[str] = ..., uid: _Optional[str] = ...) -> None: ...

class ListVersionsResponse(_message.Message):
    __slots__ = ("versions", "server_time_ms")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SERVER_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[VersionSummary]
    server_time_ms: int
    def __init__(self, versions: _Optional[_Iterable[_Union[VersionSummary, _Mapping]]] = ..., server_time_ms: _Optional[int] = ...) -> None: ...

class LatestVersionRequest(_message.Message):
    __slots__ = ("model_name", "min_state")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MIN_STATE_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    min_state: _refit_pb2.WeightVersionState
    def __init__(self, model_name: _Optional[str] = ..., min_state: _Optional[_Union[_refit_pb2.WeightVersionState, str]] = ...) -> None: ...

class LatestVersionResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: VersionSummary
    def __init__(self, version: _Optional[_Union[VersionSummary, _Mapping]] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("version_id", "lease_id", "worker_id", "ttl_seconds")
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    version_id: str
    lease_id: str
    worker_id: str
    ttl_seconds: int
    def __init__(self, version_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., ttl_seconds: _Optional[int] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: _refit_pb2.VersionLease
    def __init__(self, lease: _Optional[_Union[_refit_pb2.VersionLease, _Mapping]] = ...) -> None: ...

class RevokeLeasesRequest(_message.Message):
    __slots__ = ("version_id",)
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    version_id: str
    def __init__(self, version_id: _Optional[str] = ...) -> None: ...

class RevokeLeasesResponse(_message.Message):
    __slots__ = ("revoked",)
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    revoked: int
    def __init__(self, revoked: _Optional[int] = ...) -> None: ...
