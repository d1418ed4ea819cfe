"""Text of others, fit to be shown: `printable("a\\x1b[2J")` is `a\\x1b[2J` with its escape spelled out.

Invariant: the result holds no character that moves a cursor, breaks a line or turns the direction of reading.
"""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """`text` with every character that cannot be printed as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii") for c in text)
