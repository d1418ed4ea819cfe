"""What the directory's services share: requests that cannot be served, and calls of a store that may wait for the network.

    try:
        check_names(request, "worker_id")
    except Refused as refusal:
        await refuse(context, "UpdateStatus", refusal)
    known = await on_store(store, context, lambda: store.beat(...))

Invariant: every refusal is INVALID_ARGUMENT with a message that says what to send instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import grpc

from mx_common.directory.store import Store
from mx_common.errors import DirectoryUnavailable

__all__ = ["Refused", "check_enums", "check_names", "on_store", "refuse", "unknown_value"]

MAX_NAME_BYTES = 4096

T = TypeVar("T")


class Refused(Exception):
    """A request that cannot be served; the message goes to the client."""


async def refuse(context: Any, call: str, refusal: Exception) -> NoReturn:
    """Answer `call` with what `refusal` says."""
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{call}: {refusal}")
    raise AssertionError("abort always raises")


async def on_store(store: Store, context: Any, call: Callable[[], T]) -> T:
    """What `call` returns, outside the event loop where it may block; UNAVAILABLE while the store cannot be reached."""
    try:
        return await asyncio.to_thread(call) if store.blocking else call()
    except DirectoryUnavailable as error:
        # the client may try again, here or at a server beside this one
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        raise


def check_names(message: Any, *fields: str) -> None:
    """Raises Refused for a text field that is empty or too long to be a name."""
    for field in fields:
        size = len(getattr(message, field).encode())
        if not size:
            raise Refused(f"{field} is empty; it has to name something")
        if size > MAX_NAME_BYTES:
            raise Refused(f"{field} has {size} bytes; at most {MAX_NAME_BYTES} are allowed")


def check_enums(message: Any, *fields: str) -> None:
    """Raises Refused for an enum field whose number is not known here."""
    for field in fields:
        if problem := unknown_value(message, field):
            raise Refused(problem)


def unknown_value(message: Any, field: str) -> str:
    """Why the number in an enum field of a request cannot be used; "" when it can."""
    known = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number
    value = getattr(message, field)
    if value in known:
        return ""
    names = ", ".join(f"{number} {member.name}" for number, member in sorted(known.items()))
    return f"{field}={value} is not known here; known are {names}"
