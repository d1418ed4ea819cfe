"""What every engine's driver needs to bring a running engine to a version: which one, what it is told, and its endpoints.

    asked = Asked("org/model", path="staged")           # the settings, refused here when they are wrong
    number = asked.ready_version(None, timeout=60)      # serving goes on meanwhile
    post(url, "/pause", {...})

Invariant: an engine is asked for a version by number, and only when it is READY.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mx_common import envs
from mx_common.directory.embedded import resolve
from mx_common.directory.refit_client import RefitClient
from mx_common.errors import ConfigError, RefitFailed
from mx_common.refit.engine import PATHS

__all__ = ["Asked", "Update", "ended_after_failure", "post", "update_seconds"]


@dataclass(frozen=True)
class Asked:
    """`model_name`: what the trainer publishes under ("": the engine's own). `path`: reshard or staged. `server`: the directory ("":
    `MX_SERVER_ADDRESS`, else the embedded one). `only`: patterns of checkpoint names to refit (`*.experts.*`); none: all."""

    model_name: str = ""
    path: str = "reshard"
    server: str = ""
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.path not in PATHS:
            raise ConfigError(f"refit path {self.path!r}: use {' or '.join(PATHS)}")
        for name in ("model_name", "server"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}={getattr(self, name)!r}: give a text")
        if not isinstance(self.only, (list, tuple)) or not all(isinstance(pattern, str) for pattern in self.only):
            raise ConfigError(f"only={self.only!r}: give a list of patterns")
        object.__setattr__(self, "only", tuple(self.only))

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Asked:
        """From JSON. Raises ConfigError that names what nobody knows."""
        unknown = said.keys() - set(cls.__dataclass_fields__)
        if unknown:
            raise ConfigError(f"unknown refit settings {sorted(unknown)}: there are {sorted(cls.__dataclass_fields__)}")
        return cls(**said)

    def as_json(self) -> dict[str, Any]:
        """For an engine's endpoint; `of` reads it."""
        return {**asdict(self), "only": list(self.only)}

    def wanted(self) -> Callable[[str], bool] | None:
        """The predicate on checkpoint names; None: all."""
        only = self.only
        return (lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in only)) if only else None

    def ready_version(self, version: int | None = None, timeout: float | None = None) -> int:
        """`version` (None: the newest) once it is READY. Raises SourceLost after `timeout` seconds (`MX_REFIT_WAIT_SECONDS`)."""
        seconds = envs.REFIT_WAIT_SECONDS.get() if timeout is None else timeout
        with RefitClient(resolve(self.server or None)) as client:
            return client.wait_for(self.model_name, version, seconds).number


@dataclass(frozen=True)
class Update:
    """What an engine is asked for. `version`: the number the trainer published, none for the newest. `timeout`: seconds to wait until it
    is READY, none for `MX_REFIT_WAIT_SECONDS`."""

    version: int | None = None
    timeout: float | None = None


@contextlib.contextmanager
def ended_after_failure(*ends: Callable[[], object]) -> Iterator[None]:
    """When something fails inside, `ends` close, in their order, what the engine still has open of the update. Whether one fails too is no
    matter, but those after it are not called then."""
    try:
        yield
    except Exception:
        with contextlib.suppress(Exception):
            for end in ends:
                end()
        raise


def update_seconds() -> float:
    """How long an engine may take for the call that reads a version: the wait for it, and its sources one after the other if need be."""
    return envs.REFIT_WAIT_SECONDS.get() + 4 * envs.TRANSFER_TIMEOUT.get()


def post(
    url: str, path: str, body: Mapping[str, Any] | None = None, *, seconds: float = 0.0, advice: Sequence[tuple[int, str]] = ()
) -> Any:
    """What the engine's endpoint answers within `seconds` (`MX_TRANSFER_TIMEOUT` and `MX_RPC_TIMEOUT` unless given), read as JSON where it
    is. Raises RefitFailed with what it said, ConfigError for a url without a scheme; `advice`: what an HTTP status means there."""
    seconds, url = seconds or envs.TRANSFER_TIMEOUT.get() + envs.RPC_TIMEOUT.get(), url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"engine url {url!r}: give it with its scheme, http://host:port")
    started = time.monotonic()
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, method="POST", headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            said = answer.read()
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:2000]
        hint = "".join(f"; {meaning}" for status, meaning in advice if status == error.code)
        raise RefitFailed(f"{url}{path} answered {error.code}: {text}{hint}") from error
    except OSError as error:
        raise RefitFailed(
            f"{url}{path} gave no answer ({time.monotonic() - started:.1f} s of {seconds:g} s): {error}"
        ) from error
    try:
        return json.loads(said)
    except ValueError:
        return said.decode(errors="replace")
