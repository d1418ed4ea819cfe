"""Lets the pack's own loggers speak through vLLM's, with its format, level and rank.

Invariant: done when the load format is used, never at import; the root logger is not touched.
"""

from __future__ import annotations

import logging

__all__ = ["speak_through_vllm"]


def speak_through_vllm() -> None:
    """Give the loggers `mx_common` and `mx_patches` the handlers and the level of `vllm`. Idempotent."""
    theirs = logging.getLogger("vllm")
    for name in ("mx_common", "mx_patches"):
        ours = logging.getLogger(name)
        ours.setLevel(theirs.level)
        for handler in theirs.handlers:
            if handler not in ours.handlers:
                ours.addHandler(handler)
        ours.propagate = theirs.propagate or not theirs.handlers
