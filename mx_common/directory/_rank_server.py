"""A small gRPC server that a rank runs beside its real work: what a reader asks of the rank itself.

    class ManifestServer(RankServer):
        def GetWeightVersionShardManifest(self, request, context): ...

    server = ManifestServer(REFIT_WORKER_SERVICE, host="10.0.0.7", port=0, what="the manifest service", advice="use port 0 for any").start()

Invariant: what is advertised is what others dial; a loopback host is bound as it is, any other on all interfaces, since an advertised
name need not be an address of this machine. The port belongs to exactly one server. Methods run in threads of their own, so that a slow
one holds up nobody; without calls nothing wakes up.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from mx_common.directory._aio_thread import AioThread, join, leave
from mx_common.directory._channel import message_limits
from mx_common.directory.address import Address
from mx_common.errors import DirectoryUnavailable
from mx_common.wire.rpc import service_handler

__all__ = ["RankServer"]

log = logging.getLogger(__name__)

Self = TypeVar("Self", bound="RankServer")

THREADS = 4
START_SECONDS = 10.0


class RankServer:
    """Serves `service` with the methods of the subclass. `what` names it in messages, `advice` says what to do about a taken port."""

    def __init__(self, service: ServiceDescriptor, *, host: str, port: int, what: str, advice: str) -> None:
        bracketed = f"[{host}]" if ":" in host else host
        self._service, self._what, self._advice = service, what, advice
        self._advertised = Address.parse(f"{bracketed}:{port}", what=f"address of {what}", binding=True)
        self._server: Any = None
        self._pool: ThreadPoolExecutor | None = None
        self._thread: AioThread | None = None
        self._beginning: asyncio.Task[Any] | None = None

    @property
    def endpoint(self) -> str:
        """`host:port` for others to dial. Only after `start`."""
        if self._server is None:
            raise DirectoryUnavailable(f"{self._what} is not running: call start() first")
        return str(self._advertised)

    def start(self: Self) -> Self:
        """Bind and serve. Returns itself. Raises `DirectoryUnavailable` when the port cannot be bound."""
        if self._server is not None:
            return self
        bind = self._advertised
        if not bind.is_loopback:
            bind = Address("::" if ":" in bind.host else "0.0.0.0", bind.port)
        self._thread = join()
        try:
            port = self._thread.run(self._begin(bind), seconds=START_SECONDS)
        except Exception as error:  # a bare RuntimeError from gRPC; whatever it was, the caller has no server
            self.stop()
            raise DirectoryUnavailable(f"{self._what} cannot bind {bind}: {error}; free the port, or {self._advice}") from error
        self._advertised = Address(self._advertised.host, port)
        log.info("%s serves on %s", self._what, self._advertised)
        return self

    def stop(self, grace: float = 0.5) -> None:
        """Stop serving; calls in flight have `grace` seconds to end."""
        thread, self._thread = self._thread, None
        if thread is not None:
            leave(thread, self._end(grace), seconds=grace + START_SECONDS)
        self._server = None

    async def _begin(self, bind: Address) -> int:
        """The port bound."""
        self._beginning = asyncio.current_task()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="mx-rank-service")
        options = [*message_limits(), ("grpc.so_reuseport", 0)]
        server = grpc.aio.server(migration_thread_pool=self._pool, options=options)
        server.add_generic_rpc_handlers((service_handler(self._service, self),))
        port = server.add_insecure_port(str(bind))
        await server.start()
        self._server = server
        return int(port)

    async def _end(self, grace: float) -> None:
        if self._beginning is not None:  # one that took too long may make a server after all
            await asyncio.wait({self._beginning})
        server, self._server = self._server, None
        pool, self._pool = self._pool, None
        if server is not None:
            await server.stop(grace)
        if pool is not None:
            pool.shutdown(wait=False)

    def __enter__(self: Self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
