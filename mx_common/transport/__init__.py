"""Moves bytes between registered memory of two workers, one-sided, behind one small protocol.

    from mx_common.transport import open_transport

    transport = open_transport("worker-7")
    transport.register(regions)                              # Regions: columns of address, length, device
    peer = transport.connect(metadata)                       # what the source published
    result = transport.read(peer, reads, timeout=300, stall_timeout=30)
    transport.close()

Invariant: a read either brings every byte or raises; after an aborted one (`transport.tainted`) late bytes may still land in
the local memory until `close` has returned.
"""

from __future__ import annotations

from mx_common.errors import ConfigError
from mx_common.transport._columns import Reads, Regions
from mx_common.transport._protocol import Progress, Transport, WireResult
from mx_common.transport.local import LocalTransport

__all__ = ["LocalTransport", "Progress", "Reads", "Regions", "Transport", "WireResult", "open_transport"]


def open_transport(name: str, kind: str = "nixl", *, listen_port: int | None = None) -> Transport:
    """A transport under the agent name `name`, unique among the peers that will meet it.

    `kind` is "nixl" or "local" (in-process). `listen_port`: also publish the metadata on this TCP port (0: any free one), for
    peers that fetch it themselves; nixl only. Raises ConfigError for an unknown kind, TransportUnavailable when it cannot
    work here.
    """
    if kind == "local":
        return LocalTransport(name)
    if kind == "nixl":
        from mx_common.transport.nixl import NixlTransport

        return NixlTransport(name, listen_port=listen_port)
    raise ConfigError(f"unknown transport {kind!r}; known: local, nixl")
