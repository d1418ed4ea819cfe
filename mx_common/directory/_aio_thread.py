"""The thread in which all gRPC servers of a process live: the directory's and those that ranks run beside their work.

    thread = join()                      # starts it for the first server
    port = thread.run(begin(), seconds=10)
    leave(thread, server.stop(0.5), seconds=2)  # ends it with the last server

Why one: gRPC hands its events to any asyncio loop of the process, and loops that find them gone log errors. Why asyncio at all: gRPC's
servers on threads wake up once a second for ever, this one only when somebody calls. Invariant: there is a thread while there is a server.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["NAME", "AioThread", "join", "leave"]

log = logging.getLogger(__name__)

NAME = "mx-grpc"

T = TypeVar("T")


class AioThread:
    """An asyncio loop in a daemon thread, begun when made."""

    def __init__(self) -> None:
        self.servers = 0
        self.process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=NAME, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], *, seconds: float) -> T:
        """What `work` returns or raises; `TimeoutError` when it takes longer than `seconds`. It goes on then: gRPC's servers crash
        when they are cancelled."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)
        except concurrent.futures.TimeoutError as error:  # not the built-in one before Python 3.11
            raise TimeoutError(f"not done within {seconds:g} s") from error

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in it."""
        return threading.current_thread() is self._thread

    def end(self, seconds: float = 10.0) -> None:
        """Returns when the thread has ended."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(seconds)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()


_lock = threading.Lock()
_current: AioThread | None = None


def join() -> AioThread:
    """The thread, for one more server."""
    global _current
    with _lock:
        # a forked child has the object and not the thread
        if _current is None or _current.process != os.getpid():
            _current = AioThread()
        _current.servers += 1
        return _current


def leave(thread: AioThread, ending: Coroutine[Any, Any, None], *, seconds: float) -> None:
    """One server less, after `ending` and at most `seconds`. The last one ends the thread. In a forked child nothing is to be ended.
    Called in the thread itself, by a collection of garbage say, it returns at once, and the server ends after that."""
    global _current
    if thread.process != os.getpid():
        ending.close()
        return
    if thread.is_current:  # it cannot wait for itself
        threading.Thread(
            target=leave, args=(thread, ending), kwargs={"seconds": seconds}, name=f"{NAME}-end", daemon=True
        ).start()
        return
    try:
        thread.run(ending, seconds=seconds)
    except (Exception, concurrent.futures.CancelledError) as error:  # whatever gRPC raises, the server is not counted any more
        log.warning("a gRPC server did not end: %s: %s", type(error).__name__, error)
    with _lock:
        thread.servers -= 1
        last = thread.servers == 0
        if last and _current is thread:
            _current = None
    if last:
        thread.end()
