# Types of activity.proto. Made by `python scripts/generate_wire.py`; do not edit.
# ruff: noqa
# fmt: off
# mypy: disable-error-code="type-arg"
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Activity(_message.Message):
    __slots__ = ("activity_id", "worker_id", "host", "rank", "world", "engine", "path", "model_name", "version", "version_id", "sources", "stage", "bytes_done", "bytes_total", "gbps", "seconds")
    ACTIVITY_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GBPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    activity_id: str
    worker_id: str
    host: str
    rank: int
    world: int
    engine: str
    path: str
    model_name: str
    version: int
    version_id: str
    sources: _containers.RepeatedScalarFieldContainer[str]
    stage: str
    bytes_done: int
    bytes_total: int
    gbps: float
    seconds: float
    def __init__(self, activity_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., host: _Optional[str] = ..., rank: _Optional[int] = ..., world: _Optional[int] = ..., engine: _Optional[str] = ..., path: _Optional[str] = ..., model_name: _Optional[str] = ..., version: _Optional[int] = ..., version_id: _Optional[str] = ..., sources: _Optional[_Iterable[str]] = ..., stage: _Optional[str] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., gbps: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class ReportActivityRequest(_message.Message):
    __slots__ = ("activity", "ended")
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    activity: Activity
    ended: bool
    def __init__(self, activity: _Optional[_Union[Activity, _Mapping]] = ..., ended: _Optional[bool] = ...) -> None: ...

class ReportActivityResponse(_message.Message):
    __slots__ = ("pause_seconds",)
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    pause_seconds: float
    def __init__(self, pause_seconds: _Optional[float] = ...) -> None: ...

class ListActivitiesRequest(_message.Message):
    __slots__ = ("model_name",)
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    def __init__(self, model_name: _Optional[str] = ...) -> None: ...

class ListActivitiesResponse(_message.Message):
    __slots__ = ("activities",)
    ACTIVITIES_FIELD_NUMBER: _ClassVar[int]
    activities: _containers.RepeatedCompositeFieldContainer[Activity]
    def __init__(self, activities: _Optional[_Iterable[_Union[Activity, _Mapping]]] = ...) -> None: ...
