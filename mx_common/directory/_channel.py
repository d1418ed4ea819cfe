"""Channels and limits that every control call of this pack shares.

    with closing(open_channel(Address.parse("127.0.0.1:8001"))) as channel: ...

Invariants: loopback never goes through a proxy named by the environment; a refused connection is tried again within a second,
not after the minutes gRPC would wait by default; a manifest of a million tensors fits in one message.
"""

from __future__ import annotations

from typing import Any

import grpc

from mx_common.directory.address import Address

__all__ = ["MAX_MESSAGE_BYTES", "message_limits", "open_channel"]

MAX_MESSAGE_BYTES = 128 << 20
CONNECT_MS = 5000


def message_limits() -> list[tuple[str, int]]:
    """The gRPC options, for channels and for servers, that let big manifests pass."""
    return [("grpc.max_send_message_length", MAX_MESSAGE_BYTES), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]


def open_channel(address: Address) -> Any:
    """A lazily connecting plain-text `grpc.Channel` to `address`; the caller closes it."""
    options = [
        *message_limits(),
        # retries are made by the callers, who know the deadline of the whole call
        ("grpc.enable_retries", 0),
        # a shared connection would also share its back-off with a server that was there before
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # this one is also how long an attempt to connect may take: a busy or distant server needs more than a moment
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    if address.is_loopback:
        options.append(("grpc.enable_http_proxy", 0))
    return grpc.insecure_channel(str(address), options=options)
