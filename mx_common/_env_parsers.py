"""What the text of an environment variable may be: parsers for the table in `mx_common.envs`.

    parse = number(0.0, above=True)
    parse("2.5")                # 2.5
    parse("nan")                # ValueError("is not finite"): the words that follow the variable's name and value

Invariant: pure; a parser returns a value of its type or raises ValueError with words for a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

__all__ = ["address", "choice", "flag", "floor_bound", "integer", "number"]

_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def address(raw: str) -> str:
    """host:port, with an IPv6 host in brackets."""
    host, colon, port = raw.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError("is not host:port")
    return raw


def choice(choices: tuple[str, ...]) -> Callable[[str], str]:
    """One of `choices`, in any case."""

    def parse(raw: str) -> str:
        if raw.lower() not in choices:
            raise ValueError("is not one of the known values")
        return raw.lower()

    return parse


def flag(raw: str) -> bool:
    """1 or 0, and the usual words."""
    if raw.lower() not in _FLAGS:
        raise ValueError("is not a flag")
    return _FLAGS[raw.lower()]


def number(low: float, *, above: bool, clamp: bool) -> Callable[[str], float]:
    """A finite number from `low` (exclusive when `above`); what is smaller becomes `low` when `clamp`."""

    def parse(raw: str) -> float:
        value = _finite(raw)
        if value < low or (above and value == low):
            if clamp:
                return low
            raise ValueError("is out of range")
        return value

    return parse


def integer(low: int, high: int | None) -> Callable[[str], int]:
    """A whole number from `low` to `high`, both included."""

    def parse(raw: str) -> int:
        try:
            value = int(raw)
        except ValueError:
            raise ValueError("is not a whole number") from None
        if value < low or (high is not None and value > high):
            raise ValueError("is out of range")
        return value

    return parse


def floor_bound(auto: bool) -> Callable[[str], float | Literal["auto"]]:
    """A rate that is not negative, or the word auto where it is allowed."""

    def parse(raw: str) -> float | Literal["auto"]:
        if auto and raw.lower() == "auto":
            return "auto"
        value = _finite(raw)
        if value < 0:
            raise ValueError("is negative")
        return value

    return parse


def _finite(raw: str) -> float:
    try:
        value = float(raw)
    except ValueError:
        raise ValueError("is not a number") from None
    if not math.isfinite(value):
        raise ValueError("is not finite")
    return value
