"""Lets the pack's own loggers speak through an engine's, with its format and level.

    speak_through("vllm")

Invariant: done when an adapter is used, never at import; the root logger is not touched.
"""

from __future__ import annotations

import logging

__all__ = ["speak_through"]

OURS = ("mx_common", "mx_patches")


def speak_through(engine: str) -> None:
    """Give the pack's loggers the handlers and the level of the logger `engine`. Idempotent."""
    theirs = logging.getLogger(engine)
    for name in OURS:
        ours = logging.getLogger(name)
        ours.setLevel(theirs.level)
        for handler in theirs.handlers:
            if handler not in ours.handlers:
                ours.addHandler(handler)
        ours.propagate = theirs.propagate or not theirs.handlers
