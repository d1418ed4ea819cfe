"""What a `host:port` of a control service may look like, checked before anything is dialled.

    Address.parse("127.0.0.1:8001", what="MX_SERVER_ADDRESS").is_loopback     # True

A `http://` prefix, which ModelExpress clients accept, is dropped. Invariant: an `Address` is always dialable text; whatever
else is written is refused with a `ConfigError` that names the setting.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from mx_common.errors import ConfigError

__all__ = ["Address", "host_towards"]

_HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*\.?"
)
_DOTTED = re.compile(r"[0-9.]+")


@dataclass(frozen=True)
class Address:
    """A host (name, IPv4, or IPv6 without brackets) and a port from 0 to 65535; 0 only where something binds."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, what: str = "address", binding: bool = False) -> Address:
        """Read `host:port` or `[ipv6]:port`. `binding` allows port 0. Raises `ConfigError`."""
        bare = text.strip()
        if bare.startswith("http://"):
            bare = bare.removeprefix("http://").removesuffix("/")
        host, colon, port = bare.rpartition(":")
        problem = ""
        if "://" in bare:
            problem = "has a scheme, and only plain gRPC is spoken"
        elif not colon or not host:
            problem = "has no host or no port"
        elif not (port.isascii() and port.isdigit()) or not (0 if binding else 1) <= int(port) <= 65535:
            problem = f"has a port that is not a number from {0 if binding else 1} to 65535"
        elif not _is_host(host):
            problem = "has a host that is neither a name, nor an IPv4 address, nor an IPv6 address in brackets"
        if problem:
            raise ConfigError(f"{what}={text!a} {problem}; write host:port, for example 10.0.0.5:8001")
        return cls(host.strip("[]"), int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. Other names than localhost are not resolved: they count as remote."""
        if self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _is_host(host: str) -> bool:
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed or _DOTTED.fullmatch(host):
        try:
            return ipaddress.ip_address(host.strip("[]")).version == (6 if bracketed else 4)
        except ValueError:
            return False
    return bool(_HOST_NAME.fullmatch(host))


def host_towards(address: Address) -> str:
    """The address of this machine that routes to `address`; no packet is sent. Loopback when no route is known."""
    for family, kind, protocol, _, target in _candidates(address):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(target)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _candidates(address: Address) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    try:
        return list(socket.getaddrinfo(address.host, address.port or 1, type=socket.SOCK_DGRAM))
    except OSError:
        return []
