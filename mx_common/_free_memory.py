"""How much more host memory this process may take: of the machine's, and of what the container that it runs in is allowed.

    if nbytes < free_memory() // 2: ...

Invariant: a control group that has no limit, or is not shown here, takes nothing from what the machine has.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["free_memory"]

_ROOT = Path("/")


class _Files(NamedTuple):
    """Where a kind of control groups lies, and how it names a group's limit, what is used of it, and which part of that is cache that
    the kernel drops before it refuses (the first of these that memory.stat has)."""

    mount: str
    limit: str
    used: str
    cache: tuple[str, ...]


_V2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file",))
# v1 tells both: `inactive_file` is of the group alone, the total also of the groups in it, as the usage is
_V1 = _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "inactive_file"))


def free_memory(root: Path | None = None) -> int:
    """Bytes: the least of MemAvailable and of the room in every control group around this process. `root` has `proc` and `sys` in it."""
    root = root or _ROOT
    available = _numbers((root / "proc/meminfo").read_text("ascii"))["MemAvailable:"] * 1024
    return min([available, *_rooms(root)])


def _rooms(root: Path) -> Iterator[int]:
    """What each group with a limit has left."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, own = rest.partition(":")
        if "memory" in controllers.split(","):
            files = _V1
        elif number == "0" and not controllers:
            files = _V2
        else:
            continue
        mount = root / files.mount
        group = mount / own.lstrip("/")
        # a group outside of what this container is shown; its own is the mount
        around = [mount] if ".." in group.parts else [group, *group.parents]
        for one in around:
            if one == mount or mount in one.parents:
                yield from _room(one, files)


def _room(group: Path, files: _Files) -> Iterator[int]:
    limit, used = _text(group / files.limit).strip(), _text(group / files.used).strip()
    if limit.isdecimal() and used.isdecimal():
        stat = _numbers(_text(group / "memory.stat"))
        cache = next((stat[name] for name in files.cache if name in stat), 0)
        yield max(0, int(limit) - max(0, int(used) - cache))


def _numbers(text: str) -> dict[str, int]:
    """The lines that are a name and a number."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _text(path: Path) -> str:
    """Empty where there is no such file, or none that may be read."""
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""
