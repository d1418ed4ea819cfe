"""One NIXL agent behind calls that lock, translate errors and can be ended for good.

    agent = Agent("worker-7", "UCX", listen_port=None)
    agent.register(rows, "DRAM")
    agent.destroy()

Only this module touches the `nixl` package. Invariant: after `destroy` the agent's C++ object is gone, which is what stops late
writes, even while an exception whose traceback went through here is still alive: no frame holds a NIXL handle, only a `Posted`
that `destroy` empties.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mx_common import envs
from mx_common.errors import MxError, SourceLost, TransferError, TransportUnavailable
from mx_common.transport._columns import Reads

__all__ = ["Agent", "Posted"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_UCX_DEFAULTS = {
    # a link that went down is noticed after about ten seconds instead of never
    "UCX_TCP_KEEPIDLE": "1s",
    "UCX_TCP_KEEPINTVL": "1s",
    # A peer may answer in pieces of up to its TX_SEG_SIZE, and UCX writes a piece past the end of a smaller receive buffer. So
    # this end takes large ones and sends those of UCX's own default, which every reader has room for.
    "UCX_TCP_RX_SEG_SIZE": "256k",
}

_MEANING = {
    "nixlRemoteDisconnectError": (SourceLost, "the peer is gone or was cut off; take another source"),
    "nixlNotFoundError": (TransferError, "unknown peer, or an address outside the memory registered here or there"),
    "nixlInvalidParamError": (TransferError, "NIXL refused the request as malformed"),
    "nixlMismatchError": (TransferError, "the metadata is damaged, or comes from an incompatible NIXL version"),
    "nixlNotAllowedError": (TransferError, "a peer of this name is connected with other metadata; disconnect it first"),
    "nixlNotSupportedError": (TransferError, "the backend does not support this"),
    "nixlBackendError": (TransferError, "the NIXL backend failed; its log lines on stderr say why"),
}


class Posted:
    """One group of reads given to NIXL: its handle until it is released, size in bytes, and when it was posted."""

    __slots__ = ("bytes", "done", "handle", "since")

    def __init__(self, handle: Any, size: int) -> None:
        self.handle = handle
        self.bytes = size
        self.done = False
        self.since = time.monotonic()


class Agent:
    """Thread-safe: NIXL is told not to lock, so every call here holds one lock. Raises TransportUnavailable."""

    def __init__(self, name: str, backend: str, listen_port: int | None) -> None:
        self.name = name
        self._lock = threading.RLock()
        self._open: list[Posted] = []
        api = _import_nixl()
        self._errors = _error_types(api)
        for variable, value in _UCX_DEFAULTS.items():
            envs.set_default(variable, value)
        config = api.nixl_agent_config(
            enable_prog_thread=False,  # it would keep one core busy for as long as the process lives
            enable_listen_thread=listen_port is not None,
            listen_port=listen_port or 0,
            backends=[backend],
        )
        try:
            self._nixl: Any = api.nixl_agent(name, config)
        except self._errors as error:
            raise TransportUnavailable(
                f"{name}: NIXL cannot start its backend {backend} on this machine ({error}); "
                "set MX_NIXL_BACKEND to one that works here"
            ) from error.with_traceback(None)
        if backend not in self._nixl.backends:
            known = ", ".join(sorted(self._nixl.get_plugin_list()))
            self.destroy()
            raise TransportUnavailable(f"{name}: NIXL has no backend {backend!r}; set MX_NIXL_BACKEND to one of: {known}")

    def _call(self, doing: str, act: Callable[[Any], T]) -> T:
        with self._lock:
            if self._nixl is None:
                raise TransferError(f"{self.name}: the transport is closed; open a new one")
            try:
                return act(self._nixl)
            except self._errors as error:
                kind, meaning = _MEANING.get(type(error).__name__, (TransferError, "unexpected NIXL error"))
                # frames below hold NIXL handles, which must not outlive `destroy`; a context manager would keep their traceback
                raise kind(f"{self.name}: {doing}: {meaning} ({error})") from error.with_traceback(None)

    def register(self, rows: npt.NDArray[np.uint64], mem: str) -> Any:
        """A token for `deregister`. `rows`: (n, 3) address, length, device."""
        return self._call(f"registering {len(rows)} {mem} regions", lambda nixl: nixl.register_memory(rows, mem))

    def deregister(self, token: Any) -> None:
        self._call("deregistering memory", lambda nixl: nixl.deregister_memory(token))

    def metadata(self) -> bytes:
        return self._call("reading the agent's metadata", lambda nixl: bytes(nixl.get_agent_metadata()))

    def add_remote(self, metadata: bytes) -> str:
        peer = self._call(f"connecting with {len(metadata)} bytes of metadata", lambda nixl: nixl.add_remote_agent(metadata))
        return peer.decode() if isinstance(peer, bytes) else str(peer)

    def remove_remote(self, peer: str) -> None:
        self._call(f"disconnecting {peer!r}", lambda nixl: nixl.remove_remote_agent(peer))

    def fetch_remote(self, peer: str, host: str, port: int) -> None:
        """Ask a listener for its metadata; `has_remote` tells when it has come."""
        doing = f"asking {host}:{port} for the metadata of {peer!r}"
        self._call(doing, lambda nixl: nixl.fetch_remote_metadata(peer, host, port))

    def has_remote(self, peer: str) -> bool:
        return bool(self._call(f"looking for the metadata of {peer!r}", lambda nixl: nixl.check_remote_metadata(peer)))

    def prepare(self, peer: str, reads: Reads) -> Posted:
        """Check and set up reads; nothing moves yet."""

        def act(nixl: Any) -> Posted:
            local = nixl.get_xfer_descs(reads.local_rows(), reads.local_mem)
            remote = nixl.get_xfer_descs(reads.remote_rows(), reads.remote_mem)
            posted = Posted(nixl.initialize_xfer("READ", local, remote, peer), reads.total_bytes)
            self._open.append(posted)
            return posted

        return self._call(f"{len(reads)} reads from {peer!r}", act)

    def post(self, posted: Posted, peer: str) -> None:
        """Start prepared reads; `posted.done` when they completed within the call."""
        posted.since = time.monotonic()
        self._advance(posted, peer, lambda nixl: nixl.transfer(posted.handle))

    def poll(self, posted: Posted, peer: str) -> bool:
        """Whether the reads are complete; also moves them on."""
        if not posted.done:
            self._advance(posted, peer, lambda nixl: nixl.check_xfer_state(posted.handle))
        return posted.done

    def _advance(self, posted: Posted, peer: str, act: Callable[[Any], str]) -> None:
        doing = f"reading from {peer!r}"
        state = self._call(doing, act)
        if state == "ERR":
            raise TransferError(f"{self.name}: {doing}: NIXL reports a failed transfer")
        posted.done = state == "DONE"

    def release(self, posted: Posted) -> None:
        """Give a handle back. An active transfer is cancelled as far as the backend can: bytes may go on arriving until
        `destroy`."""
        with self._lock:
            if posted.handle is None or self._nixl is None:
                return
            try:
                posted.handle.release()
            except self._errors as error:
                log.debug("%s: a transfer could not be released (%s); it ends with the agent", self.name, error)
                return
            posted.handle = None
            self._open.remove(posted)

    def progress(self) -> None:
        """Let peers' reads of our memory advance."""
        self._call("serving readers", lambda nixl: nixl.get_new_notifs())

    def destroy(self) -> None:
        """End the agent; idempotent. Raises TransferError when something still holds it: then its memory must not be reused."""
        with self._lock:
            if self._nixl is None:
                return
            for posted in list(self._open):
                self.release(posted)
                posted.handle = None
            self._open.clear()
            gone = weakref.ref(self._nixl.agent)
            # a wrapper that a traceback keeps alive must not keep the C++ object alive
            self._nixl.agent = None
            self._nixl = None
            if gone() is not None:
                gc.collect()
            if gone() is not None:
                raise TransferError(f"{self.name}: the NIXL agent is still referenced; memory it may write to must stay unused")


def _import_nixl() -> Any:
    raising = logging.raiseExceptions
    try:
        from nixl import _api as api
    except ImportError as error:
        raise TransportUnavailable(f"NIXL cannot be imported ({error}); pip install 'mx-adapters[nixl]'") from error
    finally:
        logging.raiseExceptions = raising  # importing nixl switches it off for the whole process
    _quiet_nixl_logger()
    return api


def _quiet_nixl_logger() -> None:
    """NIXL's logger prints INFO lines on stdout, which belongs to the program: let it propagate like any other logger."""
    logger = logging.getLogger("nixl")
    for handler in list(logger.handlers):
        if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stdout, sys.__stdout__):
            logger.removeHandler(handler)
            logger.propagate = True
            if envs.foreign("NIXL_LOG_LEVEL") is None:
                logger.setLevel(logging.WARNING)


def _error_types(api: Any) -> tuple[type[Exception], ...]:
    """NIXL's exceptions have no common base; unknown C++ errors come as RuntimeError."""
    found = [v for v in vars(api.nixlBind).values() if isinstance(v, type) and issubclass(v, Exception)]
    return (*(v for v in found if not issubclass(v, MxError)), RuntimeError)
