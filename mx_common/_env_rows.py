"""What a row of the table of environment variables is, and how rows are made: the table itself is `mx_common.envs`.

    rows = Rows(environment)
    TIMEOUT = rows.number("MX_RPC_TIMEOUT", 10, "seconds one call may take", "Directory", above=True)
    TIMEOUT.get()

Invariant: a row reads the environment it was given each time it is asked, and never uses a text that it cannot parse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from mx_common import _env_parsers
from mx_common.errors import ConfigError

__all__ = ["Rows", "Setting", "Var"]

log = logging.getLogger("mx_common.envs")

T = TypeVar("T")

_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Setting(Generic[T]):
    """What one variable says now: the value in force, where it comes from, and what is wrong with the text if anything."""

    name: str
    raw: str | None
    value: T
    origin: Literal["default", "environment"]
    problem: str = ""


class Var(Generic[T]):
    """One row of the table: name, type, default, allowed range, meaning in one line."""

    def __init__(
        self,
        name: str,
        *,
        kind: str,
        default: T,
        parse: Callable[[str], T],
        meaning: str,
        group: str,
        allowed: str = "",
        strict: bool = True,
        environ: Mapping[str, str],
        shown_default: str | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.default = default
        self.meaning = meaning
        self.group = group
        self.allowed = allowed
        self.strict = strict
        self.shown_default = str(default) if shown_default is None else shown_default
        self._parse = parse
        self._environ = environ

    def read(self, environ: Mapping[str, str] | None = None) -> Setting[T]:
        """The setting as it stands, never raising: `problem` says why a text is not used. Empty text counts as unset."""
        raw = (self._environ if environ is None else environ).get(self.name)
        if raw is None or not raw.strip():
            return Setting(self.name, raw, self.default, "default")
        try:
            raw.encode("utf-8")
        except UnicodeEncodeError:
            return Setting(self.name, raw, self.default, "default", "is not valid UTF-8")
        try:
            return Setting(self.name, raw, self._parse(raw.strip()), "environment")
        except ValueError as error:
            return Setting(self.name, raw, self.default, "default", str(error) or "cannot be parsed")

    def get(self) -> T:
        """The value in force. Raises `ConfigError` for a bad text of a strict setting; warns once for the others."""
        setting = self.read()
        if setting.problem:
            shown = ascii(setting.raw)
            if self.strict:
                wanted = f"; allowed: {self.allowed}" if self.allowed else f"; expected {self.kind}"
                raise ConfigError(f"{self.name}={shown} {setting.problem}{wanted} (default {self.shown_default})")
            key = (self.name, shown)
            if key not in _warned:
                _warned.add(key)
                log.warning("%s=%s %s; using %s", self.name, shown, setting.problem, self.shown_default)
        return setting.value

    def is_set(self) -> bool:
        """Whether the operator gave this variable a usable value."""
        return self.read().origin == "environment"


class Rows:
    """Makes rows and keeps them by name, in the order in which they were made."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.table: dict[str, Var[object]] = {}

    def _add(self, var: Var[T]) -> Var[T]:
        self.table[var.name] = var  # type: ignore[assignment]
        return var

    def text(
        self, name: str, default: str, meaning: str, group: str, *, strict: bool = False, shown_default: str = ""
    ) -> Var[str]:
        """Any text, or one that must be given right (`strict`)."""
        return self._add(
            Var(
                name,
                environ=self._environ,
                kind="text",
                default=default,
                parse=str,
                meaning=meaning,
                group=group,
                strict=strict,
                shown_default=shown_default or default or "(unset)",
            )
        )

    def address(self, name: str, default: str, meaning: str, *, shown_default: str = "") -> Var[str]:
        """host:port."""
        return self._add(
            Var(
                name,
                environ=self._environ,
                kind="address",
                default=default,
                parse=_env_parsers.address,
                meaning=meaning,
                group="Directory",
                allowed="host:port",
                shown_default=shown_default or default,
            )
        )

    def choice(self, name: str, choices: tuple[str, ...], meaning: str, group: str) -> Var[str]:
        """One of several words; the first is the default."""
        return self._add(
            Var(
                name,
                environ=self._environ,
                kind="choice",
                default=choices[0],
                parse=_env_parsers.choice(choices),
                meaning=meaning,
                group=group,
                allowed=", ".join(choices),
            )
        )

    def flag(self, name: str, default: bool, meaning: str, group: str) -> Var[bool]:
        """1 or 0."""
        return self._add(
            Var(
                name,
                environ=self._environ,
                kind="flag",
                default=default,
                parse=_env_parsers.flag,
                meaning=meaning,
                group=group,
                allowed="1 or 0",
                shown_default="1" if default else "0",
            )
        )

    def number(
        self,
        name: str,
        default: float,
        meaning: str,
        group: str,
        *,
        low: float = 0.0,
        above: bool = False,
        strict: bool = True,
        clamp: bool = False,
    ) -> Var[float]:
        """A finite number from `low` on, or `above` it; a smaller one is an error, or taken as `low` (`clamp`)."""
        allowed = f"{'>' if above else '>='} {low:g}, finite"
        return self._add(
            Var(
                name,
                environ=self._environ,
                kind="number",
                default=float(default),
                parse=_env_parsers.number(low, above=above, clamp=clamp),
                meaning=meaning,
                group=group,
                allowed=f"{allowed}; smaller is {low:g}" if clamp else allowed,
                strict=strict,
                shown_default=f"{default:g}",
            )
        )

    def integer(
        self,
        name: str,
        default: int,
        meaning: str,
        group: str,
        *,
        low: int = 0,
        high: int | None = None,
        strict: bool = True,
        shown_default: str = "",
    ) -> Var[int]:
        """A whole number between `low` and `high`."""
        return self._add(
            Var(
                name,
                environ=self._environ,
                kind="integer",
                default=default,
                parse=_env_parsers.integer(low, high),
                meaning=meaning,
                group=group,
                allowed=f">= {low}" if high is None else f"{low} to {high}",
                strict=strict,
                shown_default=shown_default or str(default),
            )
        )

    def floor_bound(self, name: str, meaning: str, *, auto: bool) -> Var[float | Literal["auto"]]:
        """Gbit/s, 0 for off, and `auto` where that is allowed."""
        off: float | Literal["auto"] = 0.0
        return self._add(
            Var(
                name,
                environ=self._environ,
                kind="number or auto" if auto else "number",
                default=off,
                parse=_env_parsers.floor_bound(auto),
                meaning=meaning,
                group="Floor",
                allowed=">= 0, finite" + (", or auto" if auto else ""),
                strict=False,
                shown_default="0 (off)",
            )
        )
