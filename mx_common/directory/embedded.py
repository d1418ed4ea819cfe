"""The directory that needs no set-up: the first process on a machine that wants one hosts it, the others find it.

    with DirectoryClient(resolve()) as directory: ...

`MX_SERVER_ADDRESS` wins when it is set. Else the directory is at `MX_EMBEDDED_ADDRESS`; when the process that hosts it ends,
the next process that asks takes over, and the sources register again with their next heartbeat. Invariants: at most one
server a process and one an address; it listens on loopback only; whoever else sits on the port is named, never used.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import closing

import grpc

from mx_common import envs
from mx_common.directory._channel import open_channel
from mx_common.directory.address import Address
from mx_common.directory.server import DirectoryServer, is_address_in_use
from mx_common.errors import ConfigError, DirectoryUnavailable
from mx_common.wire import p2p
from mx_common.wire.rpc import P2P_SERVICE, unary_calls

__all__ = ["ensure_directory", "hosted_here", "resolve", "stop_hosting"]

PROBE_SECONDS = 2.0
PAUSE_SECONDS = 0.1

_lock = threading.Lock()
_hosted: tuple[int, DirectoryServer] | None = None
_forks_watched = False


def resolve(address: str | None = None) -> str:
    """The address of the directory to use: `address`, else `MX_SERVER_ADDRESS`, else the embedded one, hosted here if need be.

    Raises `ConfigError` for a malformed address and what `ensure_directory` raises.
    """
    if address:
        return str(Address.parse(address, what="directory address"))
    configured = envs.SERVER_ADDRESS.get()
    if configured:
        return str(Address.parse(configured, what=envs.SERVER_ADDRESS.name))
    return ensure_directory()


def ensure_directory() -> str:
    """Make sure that a directory serves on `MX_EMBEDDED_ADDRESS`, in this process if nobody has the port; returns its address.

    Idempotent and safe to call from several threads. Raises `ConfigError` when the address is not loopback or belongs to
    another kind of server, `DirectoryUnavailable` when whoever has it does not answer within `MX_RPC_TIMEOUT`.
    """
    name = envs.EMBEDDED_ADDRESS.name
    address = Address.parse(envs.EMBEDDED_ADDRESS.get(), what=name)
    if not address.is_loopback:
        raise ConfigError(
            f"{name}={address} is not a loopback address, and the embedded directory is for one machine; run `mx server` there "
            f"and set {envs.SERVER_ADDRESS.name} everywhere"
        )
    if address.host.lower() == "localhost":
        address = Address("127.0.0.1", address.port)
    with _lock:
        return _bind_or_find(address)


def hosted_here() -> str | None:
    """The address of the directory that this process hosts, if it does."""
    hosted = _hosted
    return hosted[1].address if hosted is not None and hosted[0] == os.getpid() else None


def stop_hosting() -> None:
    """Stop the directory that this process hosts, if it does; another process then takes over when it needs one."""
    global _hosted
    with _lock:
        if hosted_here() is not None and _hosted is not None:
            _hosted[1].stop()
        _hosted = None


def _bind_or_find(address: Address) -> str:
    global _hosted
    # a forked child has inherited the object but not the threads that serve
    if hosted_here() == str(address):
        return str(address)
    if _hosted is not None and hosted_here() is not None:
        _hosted[1].stop()
    _hosted = None
    started = time.monotonic()
    deadline = started + envs.RPC_TIMEOUT.get()
    while True:
        server = DirectoryServer(str(address))
        try:
            server.start()
        except DirectoryUnavailable as error:
            # no cause: the port became free between the attempt and the question why
            if error.__cause__ is not None and not is_address_in_use(error.__cause__):
                raise
        else:
            _hosted = (os.getpid(), server)
            _watch_forks()
            return str(address)
        said = _probe(address, min(PROBE_SECONDS, max(deadline - time.monotonic(), PAUSE_SECONDS)))
        if said is None:
            return str(address)
        if time.monotonic() + PAUSE_SECONDS >= deadline:
            raise DirectoryUnavailable(
                f"another process has {address} and did not answer as a directory for {time.monotonic() - started:.1f} s "
                f"({said}); stop it, or set {envs.EMBEDDED_ADDRESS.name} to a free address in every process, or set "
                f"{envs.SERVER_ADDRESS.name} to a directory that runs"
            )
        time.sleep(PAUSE_SECONDS)


def _watch_forks() -> None:
    global _forks_watched
    if not _forks_watched:
        _forks_watched = True
        os.register_at_fork(after_in_child=_leave_to_parent)


def _leave_to_parent() -> None:
    """In a forked child: forget the server and give up the inherited socket, which would keep the port after the parent ends."""
    global _hosted, _lock
    hosted, _hosted, _lock = _hosted, None, threading.Lock()
    if hosted is None:
        return
    port = Address.parse(hosted[1].address).port
    for entry in os.scandir("/proc/self/fd"):
        try:
            if os.readlink(entry.path).startswith("socket:"):
                _silence(int(entry.name), port)
        except OSError:
            # the directory handle of this very loop, or a socket without a name
            continue


def _silence(fd: int, port: int) -> None:
    with socket.socket(fileno=os.dup(fd)) as inherited:
        listens = inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if not listens or inherited.family not in (socket.AF_INET, socket.AF_INET6) or inherited.getsockname()[1] != port:
            return
    # replaced, not closed: the library that opened it may close this number once more
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), fd, inheritable=False)


def _probe(address: Address, timeout: float) -> str | None:
    """None when a directory answers at `address`, else what came back; raises `ConfigError` when it surely is none."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with closing(open_channel(address)) as channel:
        try:
            health = health_pb2_grpc.HealthStub(channel)
            answer = health.Check(health_pb2.HealthCheckRequest(service=P2P_SERVICE.full_name), timeout=timeout)
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return None
            return "its health service says that it does not serve"
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                return f"{error.code().name}: {error.details()}"
        # other servers of the protocol need not report health by service name: ask what they surely have
        try:
            unary_calls(channel, P2P_SERVICE)["ListSources"](p2p.ListSourcesRequest(limit=1), timeout=timeout)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNIMPLEMENTED:
                return f"{error.code().name}: {error.details()}"
            raise ConfigError(
                f"{envs.EMBEDDED_ADDRESS.name}={address} belongs to a gRPC server that is no directory; set it to a free "
                f"address in every process, or set {envs.SERVER_ADDRESS.name} to a directory that runs"
            ) from error
    return None
