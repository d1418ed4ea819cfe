"""Counts what a directory server answers and knows.

    service_handler(P2P_SERVICE, Counted(DirectoryService(store)))
    stop = shown(store, versions)

Invariant: an answer is the same, counted or not.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import grpc

from mx_common import metrics
from mx_common.directory.records import Query
from mx_common.directory.store import Store
from mx_common.directory.versions import VersionStore
from mx_common.wire import p2p

__all__ = ["Counted", "shown"]

_PREFIX = "SOURCE_STATUS_"
# a context tells its status as a member of the enum, or as its number
_NAMES = {said: code.name for code in grpc.StatusCode for said in (code, code.value[0])}


class Counted:
    """The coroutines of `service`, for a `grpc.aio` server."""

    def __init__(self, service: object) -> None:
        self._service = service

    def __getattr__(self, name: str) -> Callable[[Any, Any], Coroutine[Any, Any, Any]]:
        method = getattr(self._service, name)

        async def answer(request: Any, context: Any) -> Any:
            code = "UNKNOWN"
            try:
                answered = await method(request, context)
                code = "OK"
                return answered
            except asyncio.CancelledError:
                code = "CANCELLED"
                raise
            except BaseException:
                code = _NAMES.get(context.code(), "UNKNOWN")
                raise
            finally:
                metrics.DIRECTORY_REQUESTS.add(method=name, code=code)

        return answer


def shown(store: Store, versions: VersionStore) -> Callable[[], None]:
    """Show on the metrics page how many sources and versions there are; returns how to stop that."""

    def sources() -> Mapping[str, float]:
        found = Counter(p2p.SourceStatus.Name(record.status).removeprefix(_PREFIX) for record in store.list(Query()))
        return {name.removeprefix(_PREFIX): found[name.removeprefix(_PREFIX)] for name in p2p.SourceStatus.keys()}  # noqa: SIM118

    stops = metrics.DIRECTORY_SOURCES.ask(sources), metrics.DIRECTORY_VERSIONS.ask(versions.counts)

    def stop() -> None:
        for one in stops:
            one()

    return stop
