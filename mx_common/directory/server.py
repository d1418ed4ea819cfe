"""A directory server beside the work of its process, for `mx server` and for the embedded default alike.

    with DirectoryServer("127.0.0.1:0") as server:
        print(server.address)

It speaks P2pService with our ActivityService, RefitService with our VersionService, the standard gRPC health service and server
reflection. Versions of trained weights lie in the memory of this server, whatever its store of sources is. Invariants: the port belongs
to exactly one server (`SO_REUSEPORT` is off), and `stop` leaves neither a thread nor a listening socket behind.
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import logging
import socket
from typing import Any

import grpc
from google.protobuf import descriptor_pool

from mx_common import envs, metrics
from mx_common.directory._activity_service import ActivityService
from mx_common.directory._aio_thread import AioThread, join, leave
from mx_common.directory._channel import message_limits
from mx_common.directory._counted import Counted, Known
from mx_common.directory._refit_service import RefitService
from mx_common.directory._service import MAX_RECORD_BYTES, DirectoryService
from mx_common.directory.address import Address
from mx_common.directory.store import MemoryStore, Store
from mx_common.directory.versions import VersionStore
from mx_common.errors import DirectoryUnavailable
from mx_common.wire import add_files
from mx_common.wire.rpc import ACTIVITY_SERVICE, P2P_SERVICE, REFIT_SERVICE, VERSION_SERVICE, service_handler

__all__ = ["DirectoryServer"]

log = logging.getLogger(__name__)

START_SECONDS = 10.0
SWEEP_SECONDS = 5.0  # answers go by ages, swept or not; this only forgets
SERVICES = (P2P_SERVICE, REFIT_SERVICE, VERSION_SERVICE, ACTIVITY_SERVICE)


class DirectoryServer:
    """Serves `store` on `address` (`host:port`, port 0 for any free one). Without a store: a `MemoryStore` by the environment.
    The same holds for `versions`.

    `start` raises `ConfigError` for a malformed address and `DirectoryUnavailable` when the address cannot be bound; the
    latter's `__cause__` is what the system said, None when the address is free again.
    """

    def __init__(
        self,
        address: str,
        store: Store | None = None,
        *,
        versions: VersionStore | None = None,
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        self._wanted = Address.parse(address, what="directory address", binding=True)
        self._store: Store = store or MemoryStore(
            stale_seconds=envs.STALE_SECONDS.get(), remove_seconds=envs.REMOVE_SECONDS.get()
        )
        self._versions = versions or VersionStore(
            staging_seconds=envs.VERSION_STAGING_SECONDS.get(), lease_seconds=envs.LEASE_SECONDS.get()
        )
        self._max_record_bytes = max_record_bytes
        self._store_is_lost = False
        self._bound: Address | None = None
        self._server: Any = None
        self._sweeper: asyncio.Task[None] | None = None
        self._beginning: asyncio.Task[Any] | None = None
        self._thread: AioThread | None = None
        self._known = Known(self._store, self._versions)

    @property
    def address(self) -> str:
        """`host:port` as bound. Only after `start`."""
        if self._bound is None:
            raise DirectoryUnavailable(f"the directory server on {self._wanted} is not running: call start() first")
        return str(self._bound)

    def start(self) -> DirectoryServer:
        """Bind and serve. Returns itself."""
        if self._thread is not None:
            return self
        if (reason := _why_not_bound(self._wanted)) is not None:
            # asked first because grpc prints every failed bind to stderr
            raise self._cannot_serve(reason) from reason
        self._thread = join()
        try:
            port = self._thread.run(self._begin(), seconds=START_SECONDS)
        except Exception as error:
            # grpc reports a failed bind as a bare RuntimeError; whatever it was, the caller has no server
            self.stop()
            # no reason and a RuntimeError: the address was taken and is free again
            cause = _why_not_bound(self._wanted) or (None if isinstance(error, RuntimeError) else error)
            raise self._cannot_serve(cause or error) from cause
        self._bound = Address(self._wanted.host, port)
        atexit.register(self.stop)
        self._known.show()
        metrics.serve()
        log.info("directory serves on %s", self._bound)
        return self

    def stop(self, grace: float = 0.5) -> None:
        """Stop serving; calls in flight have `grace` seconds to end."""
        thread, self._thread, self._bound = self._thread, None, None
        if thread is None:
            return
        atexit.unregister(self.stop)
        self._known.hide()
        leave(thread, self._end(grace), seconds=grace + START_SECONDS)

    def __enter__(self) -> DirectoryServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _cannot_serve(self, reason: BaseException) -> DirectoryUnavailable:
        return DirectoryUnavailable(f"cannot serve a directory on {self._wanted}: {reason}; free the address or choose another")

    async def _begin(self) -> int:
        """The port bound."""
        self._beginning = asyncio.current_task()
        server = grpc.aio.server(options=[*message_limits(), ("grpc.so_reuseport", 0)])
        sources = DirectoryService(self._store, max_record_bytes=self._max_record_bytes)
        refits = RefitService(self._versions, shared=self._store.blocking)
        served = zip(SERVICES, (sources, refits, refits, ActivityService(self._store)), strict=True)
        server.add_generic_rpc_handlers(tuple(service_handler(service, Counted(calls)) for service, calls in served))
        health = _add_health_and_reflection(server)
        port = server.add_insecure_port(str(self._wanted))
        await server.start()
        self._server = server
        await _serving(health)
        self._sweeper = asyncio.create_task(self._sweep_again_and_again())
        return int(port)

    async def _end(self, grace: float) -> None:
        if self._beginning is not None:  # one that took too long may make a server after all
            await asyncio.wait({self._beginning})
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._server is not None:
            await self._server.stop(grace)
        self._server = self._sweeper = None

    async def _sweep_again_and_again(self) -> None:
        while True:
            try:
                await self._sweep()
            except Exception:
                # a sweep that fails must not be the last one
                log.exception("directory on %s could not sweep", self._bound)
            await asyncio.sleep(SWEEP_SECONDS)

    async def _sweep(self) -> None:
        self._versions.sweep()
        try:
            if self._store.blocking:
                await asyncio.to_thread(self._sweep_store)
            else:
                self._sweep_store()
        except DirectoryUnavailable as error:
            if not self._store_is_lost:
                log.warning("directory on %s has lost its store, and keeps trying: %s", self._wanted, error)
            self._store_is_lost = True
        else:
            if self._store_is_lost:
                log.info("directory on %s has its store back", self._wanted)
            self._store_is_lost = False

    def _sweep_store(self) -> None:
        self._store.sweep()
        self._known.sweep()


def _add_health_and_reflection(server: Any) -> Any:
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection, reflection_pb2

    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    # reflection answers from a pool of its own: ours has no health service, and the default pool may have another p2p.proto
    pool = descriptor_pool.DescriptorPool()
    add_files(pool)
    for file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        pool.AddSerializedFile(file.serialized_pb)
    names = (*(service.full_name for service in SERVICES), health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server, pool=pool)
    return servicer


async def _serving(servicer: Any) -> None:
    from grpc_health.v1 import health_pb2

    for name in ("", *(service.full_name for service in SERVICES)):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)


def _why_not_bound(address: Address) -> OSError | None:
    """What the system says about binding `address`; None when it would work now."""
    try:
        infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return error
    for family, kind, protocol, _, target in infos:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
            except OSError as error:
                return error
    return None


def is_address_in_use(error: BaseException | None) -> bool:
    """Whether `error`, the cause of a failed `start`, says that somebody else has the address."""
    return isinstance(error, OSError) and error.errno == errno.EADDRINUSE
