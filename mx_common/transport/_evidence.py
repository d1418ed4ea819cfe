"""Tells which transport carried a read, from what the kernel counted meanwhile.

    before = Counters.now()
    ...                                                  # the read
    label = carrier(before, Counters.now(), wire_bytes, at_once=0)

UCX chooses per peer and per size, `UCX_TLS` is only a wish, and neither NIXL nor UCX lets an application ask afterwards (the
answer is printed to UCX's log only). So the bytes are looked for where they must have passed: TCP sockets of this process
(`ucx:tcp`), receive counters of RDMA devices (`ucx:rdma:mlx5_0`). When neither moved they stayed inside the host: `ucx:cma`
when most of them had arrived by the time the post returned, which only the kernel's copy out of another process can do, else
`ucx:shm` (within the host, by a mechanism that was not seen: a first small read, or XPMEM, KNEM, shared memory). Invariant: a
label is given only on such evidence, and is `ucx` alone without it. Which protocol an RDMA device ran (rc, dc, ud) does not
show in its counters and is not guessed. Other traffic of the process on tcp counts as well, so the label is that of most of
the bytes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Counters", "carrier"]

_RECEIVED = slice(128, 136)  # tcpi_bytes_received in Linux's struct tcp_info
_TCP_INFO_BYTES = 192
_RDMA_WORD = 4  # port_rcv_data counts words of 4 bytes


@dataclass(frozen=True)
class Counters:
    """Bytes received so far: by inode of each own TCP socket, and by RDMA device name."""

    sockets: Mapping[str, int] = field(default_factory=dict)
    rdma: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def now(cls, sysfs: Path = Path("/sys")) -> Counters:
        """Read the kernel's counters; what cannot be read is left out."""
        return cls(_sockets(), _rdma(sysfs))


def carrier(before: Counters, after: Counters, wire_bytes: int, *, at_once: int, host_modules: bool | None = None) -> str:
    """The label of a UCX read of `wire_bytes` bytes, `at_once` of which had arrived when their post returned. `host_modules`:
    whether XPMEM or KNEM are loaded (None: look)."""
    enough = wire_bytes // 2
    if wire_bytes <= 0:
        return "ucx"
    if sum(_moved(before.sockets, after.sockets).values()) >= enough:
        return "ucx:tcp"
    rdma = _moved(before.rdma, after.rdma)
    if sum(rdma.values()) >= enough:
        return "ucx:rdma:" + "+".join(sorted(name for name, moved in rdma.items() if moved * 10 >= wire_bytes))
    if at_once >= enough:
        modules = _host_modules() if host_modules is None else host_modules
        return "ucx:shm" if modules else "ucx:cma"
    # RDMA devices update their counters late, so with one present silence proves nothing
    return "ucx" if after.rdma else "ucx:shm"


def _moved(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {key: max(0, value - before.get(key, 0)) for key, value in after.items()}


def _host_modules() -> bool:
    return any(Path(device).exists() for device in ("/dev/xpmem", "/dev/knem"))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _sockets() -> dict[str, int]:
    # getsockopt on the descriptor itself: a duplicate would keep UCX's epoll entry alive if UCX closed the socket meanwhile
    getsockopt = _libc().getsockopt
    info = ctypes.create_string_buffer(_TCP_INFO_BYTES)
    found = {}
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    for descriptor in descriptors:
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # closed since it was listed
        size = ctypes.c_uint(_TCP_INFO_BYTES)
        if target.startswith("socket:") and (
            getsockopt(int(descriptor), socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size)) == 0
            and size.value >= _RECEIVED.stop
        ):
            found[target] = int.from_bytes(info.raw[_RECEIVED], "little")
    return found


def _rdma(sysfs: Path) -> dict[str, int]:
    totals: dict[str, int] = {}
    devices = sysfs / "class/infiniband"
    # a look that finds nothing must cost nothing: it is made twice a read
    for counter in devices.glob("*/ports/*/counters/port_rcv_data") if os.path.isdir(devices) else ():
        device = counter.parts[-5]
        try:
            totals[device] = totals.get(device, 0) + int(counter.read_text()) * _RDMA_WORD
        except (OSError, ValueError):
            continue
    return totals
