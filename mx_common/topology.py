"""Where a node is, and how close two nodes are.

    mine = local_topology()                                     # {"region": "us-east", "rack": "r2", "host": "node3"}
    shared_depth(mine, other, levels())                         # index of the narrowest domain both lie in, -1 for none

Levels run from broad to narrow, and a value is unique only inside its parent: rack `r1` of one block is not rack `r1` of
another. Invariant: nothing here raises; a topology that cannot be read is an empty one and one warning.

    with seen_from({"rack": "r9"}, ("zone", "rack", "host")): ...   # inside, the first two answer for another node
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from mx_common import envs
from mx_common._once import warn_once

__all__ = ["levels", "local_topology", "seen_from", "shared_depth"]

log = logging.getLogger(__name__)

_DOMAIN = re.compile(r"[a-z][a-z0-9-]*")

# level to value and the levels' names, where another node than this one is asked about
_seen_from: ContextVar[tuple[Mapping[str, str], tuple[str, ...]] | None] = ContextVar("mx_seen_from", default=None)


@contextmanager
def seen_from(place: Mapping[str, str], level_names: Sequence[str]) -> Iterator[None]:
    """Let `local_topology` and `levels` answer for a node at `place`: how a policy that is made inside would choose there."""
    token = _seen_from.set((place, tuple(level_names)))
    try:
        yield
    finally:
        _seen_from.reset(token)


def levels() -> tuple[str, ...]:
    """The topology levels in force, broad to narrow. A malformed name is warned about once and kept: peers may use it too."""
    if (other := _seen_from.get()) is not None:
        return other[1]
    named = _split(envs.TOPOLOGY_LEVELS.get())
    if not named:
        raw = envs.TOPOLOGY_LEVELS.get()
        warn_once(log, ("no levels", raw), "MX_P2P_TOPOLOGY_LEVELS=%s names no level; using the default", ascii(raw))
        named = _split(envs.TOPOLOGY_LEVELS.default)
    _check_names("MX_P2P_TOPOLOGY_LEVELS", named)
    return named


def local_topology() -> dict[str, str]:
    """Where this node is, level to value: `MX_P2P_TOPOLOGY`, else the files of `DYN_TOPOLOGY_MOUNT_PATH`, else empty."""
    if (other := _seen_from.get()) is not None:
        return dict(other[0])
    raw = envs.TOPOLOGY.get()
    if raw:
        source, found = "MX_P2P_TOPOLOGY", _from_json(raw)
    else:
        source, found = "DYN_TOPOLOGY_MOUNT_PATH", _from_directory(Path(envs.TOPOLOGY_MOUNT_PATH.get()))
    _check_names(source, tuple(found))
    return found


def shared_depth(a: Mapping[str, str], b: Mapping[str, str], levels: Sequence[str]) -> int:
    """Index in `levels` of the narrowest domain that holds both, -1 if none does.

    A level neither side has is skipped. A level only one side has, or where they differ, ends the walk, so that a lone matching
    leaf never counts.
    """
    depth = -1
    for index, level in enumerate(levels):
        mine, theirs = a.get(level), b.get(level)
        if mine is None and theirs is None:
            continue
        if mine != theirs:
            break
        depth = index
    return depth


def _split(raw: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in raw.split(",") if name.strip())


def _check_names(source: str, names: Sequence[str]) -> None:
    for name in names:
        if not _DOMAIN.fullmatch(name):
            warn_once(
                log,
                ("malformed level", name),
                "%s: topology level %s is malformed (wanted: a lower-case letter, then a-z, 0-9 or -); it is used as it is",
                source,
                ascii(name),
            )


def _from_json(raw: str) -> dict[str, str]:
    try:
        parsed = json.loads(raw)
        if not isinstance(parsed, dict):
            raise ValueError("is not a JSON object")
        found = {}
        for level, value in parsed.items():
            if isinstance(value, (dict, list)):
                raise ValueError(f"level {level!a} holds {type(value).__name__}, not text")
            if value is not None:
                found[level] = value if isinstance(value, str) else str(value)
                f"{level}{found[level]}".encode()  # a lone surrogate could not be published
    except (ValueError, RecursionError) as error:
        warn_once(
            log, ("topology", raw), "MX_P2P_TOPOLOGY=%s cannot be used (%s); this node has no topology", ascii(raw), error
        )
        return {}
    return found


def _from_directory(directory: Path) -> dict[str, str]:
    """One file a level, as a Kubernetes volume shows them; the dot entries are that volume's own links."""
    try:
        files = sorted(f for f in directory.iterdir() if not f.name.startswith(".") and f.is_file())
        values = {f.name: f.read_text("utf-8").strip() for f in files}
    except FileNotFoundError:
        if not envs.TOPOLOGY_MOUNT_PATH.is_set():
            return {}
        warn_once(log, ("mount", directory), "DYN_TOPOLOGY_MOUNT_PATH=%s does not exist; this node has no topology", directory)
        return {}
    except (OSError, ValueError) as error:
        warn_once(log, ("mount", directory), "the topology in %s cannot be read (%s); this node has none", directory, error)
        return {}
    return {level: value for level, value in values.items() if value}
