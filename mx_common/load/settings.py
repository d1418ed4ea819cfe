"""What one load goes by: the environment, overridden by what the engine was given on its command line.

    settings = Settings.resolve({"server": "10.0.0.7:8001", "selector": "balanced"})

Invariant: read once at the start of a load; unknown keys and bad values raise `ConfigError` that lists the known ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mx_common import envs
from mx_common.errors import ConfigError
from mx_common.selection import known_policies

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """`server` "" = embedded directory; times in seconds; `fallback` is "storage" or "none"; `model_name` "" = as the engine names it."""

    server: str = ""
    selector: str = ""
    model_name: str = ""
    revision: str = ""
    max_sources: int = 3
    fresh_seconds: float = 90.0
    verify_digest: bool = True
    fallback: str = "storage"
    transfer_timeout: float = 300.0
    stall_timeout: float = 30.0

    def __post_init__(self) -> None:
        if self.fallback not in ("storage", "none"):
            raise ConfigError(f"fallback={self.fallback!r} is not one of storage, none")
        if self.max_sources < 1:
            raise ConfigError(f"max_sources={self.max_sources} must be at least 1")
        for name in ("fresh_seconds", "transfer_timeout", "stall_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} must be more than 0 seconds, and finite")

    @property
    def directory(self) -> str:
        """Address of the directory, hosted or not."""
        return self.server or envs.EMBEDDED_ADDRESS.get()

    @classmethod
    def resolve(cls, overrides: Mapping[str, Any] | None = None) -> Settings:
        """The environment with `overrides` on top. Raises ConfigError for unknown keys and for values of the wrong type."""
        base: dict[str, Any] = {
            "server": envs.SERVER_ADDRESS.get(),
            "selector": envs.SOURCE_SELECTOR.get(),
            "model_name": envs.MODEL_NAME.get(),
            "revision": envs.MODEL_REVISION.get(),
            "max_sources": envs.MAX_SOURCES.get(),
            "fresh_seconds": envs.FRESH_SECONDS.get(),
            "verify_digest": envs.VERIFY_DIGEST.get(),
            "fallback": envs.LOAD_FALLBACK.get(),
            "transfer_timeout": envs.TRANSFER_TIMEOUT.get(),
            "stall_timeout": envs.STALL_TIMEOUT.get(),
        }
        for key, value in (overrides or {}).items():
            if key not in base:
                raise ConfigError(
                    f"unknown loader setting {key!r}; known: {', '.join(f.name for f in dataclasses.fields(cls))}"
                )
            wanted = type(base[key])
            if wanted is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if type(value) is not wanted:
                raise ConfigError(f"loader setting {key}={value!r} must be of type {wanted.__name__}")
            if key == "selector" and value.strip().lower() not in known_policies():
                raise ConfigError(f"loader setting selector={value!r} is no known policy; known: {', '.join(known_policies())}")
            base[key] = value
        return cls(**base)
