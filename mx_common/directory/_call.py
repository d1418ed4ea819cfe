"""One control call with a deadline: retries while nobody answers, and errors that say who, where, how long and what to do.

    Caller(channel_calls, peer="directory 127.0.0.1:8001", advice="…").call("ListSources", request, timeout=10, retry=True)

Invariants: the deadline covers the whole call, retries and waits included; only UNAVAILABLE is tried again, after a wait drawn
from the whole back-off interval (full jitter), since every call of the protocol may be repeated without harm.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from mx_common.errors import DirectoryError, DirectoryRefused, DirectoryUnavailable

__all__ = ["Caller"]

FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 2.0

_NOBODY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class Caller:
    """Calls of one peer. `peer` names it in messages, `advice` says what to do when it does not answer."""

    def __init__(self, calls: Mapping[str, Callable[..., Any]], *, peer: str, advice: str) -> None:
        self._calls = calls
        self._peer = peer
        self._advice = advice
        self._rng = random.Random()

    def call(self, name: str, request: Any, *, timeout: float, retry: bool) -> Any:
        """The response. Raises `DirectoryUnavailable` or `DirectoryRefused`, with the `grpc.RpcError` as cause."""
        started = time.monotonic()
        deadline = started + timeout
        backoff = FIRST_BACKOFF_SECONDS
        attempts = 0
        while True:
            attempts += 1
            try:
                return self._calls[name](request, timeout=max(deadline - time.monotonic(), 0.001))
            except grpc.RpcError as error:
                wait = self._rng.uniform(0, backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)
                again = retry and error.code() == grpc.StatusCode.UNAVAILABLE and time.monotonic() + wait < deadline
                if not again:
                    raise self._failed(name, error, time.monotonic() - started, attempts) from error
            except ValueError as error:
                # what grpc raises for a call on a channel that was closed in the meantime
                raise DirectoryUnavailable(f"{name} to the {self._peer}: this client is closed") from error
            time.sleep(wait)

    def _failed(self, name: str, error: Any, seconds: float, attempts: int) -> DirectoryError:
        tried = f"{seconds:.1f} s and {attempts} attempt{'s' if attempts > 1 else ''}"
        said = f"{error.code().name}: {error.details() or 'no details'}"
        if error.code() in _NOBODY:
            late = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            advice = f"{self._advice}, or raise MX_RPC_TIMEOUT" if late else self._advice
            return DirectoryUnavailable(f"{name} to the {self._peer} failed after {tried} ({said}); {advice}")
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:
            return DirectoryRefused(
                f"{name} is not served by the {self._peer} ({said}, {tried}); the address belongs to another kind of server"
            )
        return DirectoryRefused(f"{name} was refused by the {self._peer} after {tried} ({said}); repeating it will not help")
