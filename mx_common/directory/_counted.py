"""Counts what a directory server answers and knows.

    service_handler(P2P_SERVICE, Counted(DirectoryService(store)))
    known = Known(store, versions)
    known.show()

Invariant: an answer is the same, counted or not; a scrape waits for no store.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import grpc

from mx_common import envs, metrics
from mx_common.directory.records import Query
from mx_common.directory.store import Store
from mx_common.directory.versions import VersionStore
from mx_common.wire import p2p

__all__ = ["Counted", "Known"]

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


class Known:
    """How many sources and versions a directory knows, for the metrics page: counted when the page is asked for, but for a store that may
    wait for the network, where it is what the last sweep saw."""

    def __init__(self, store: Store, versions: VersionStore) -> None:
        self._store, self._versions = store, versions
        self._swept: Mapping[str, float] = {}
        self._stops: list[Callable[[], None]] = []

    def show(self) -> None:
        """From now on."""
        self._stops += [metrics.DIRECTORY_SOURCES.ask(self._sources), metrics.DIRECTORY_VERSIONS.ask(self._versions.counts)]

    def hide(self) -> None:
        """Not any more."""
        while self._stops:
            self._stops.pop()()

    def sweep(self) -> None:
        """To be called now and then, where waiting is allowed. Raises what the store raises, and shows no sources then."""
        self._swept = {}
        if self._store.blocking and envs.METRICS_PORT.get():
            self._swept = self._count()

    def _sources(self) -> Mapping[str, float]:
        return self._swept if self._store.blocking else self._count()

    def _count(self) -> Mapping[str, float]:
        names = [name.removeprefix(_PREFIX) for name in p2p.SourceStatus.keys()]  # noqa: SIM118
        found = Counter(p2p.SourceStatus.Name(record.status).removeprefix(_PREFIX) for record in self._store.list(Query()))
        return {name: found[name] for name in names}
