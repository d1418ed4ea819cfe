"""Warnings that are worth saying once in a process, however often their cause is met.

    warn_once(log, ("topology", raw), "MX_P2P_TOPOLOGY=%s is not a JSON object; this node has no topology", ascii(raw))

Invariant: never raises, and remembers a bounded number of keys, so that causes that vary cannot grow a process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable

__all__ = ["warn_once"]

_REMEMBERED = 1024
_said: set[Hashable] = set()
_lock = threading.Lock()


def warn_once(log: logging.Logger, key: Hashable, message: str, *args: object) -> None:
    """Log `message % args` as a warning unless `key` was warned about before."""
    with _lock:
        if key in _said or len(_said) >= _REMEMBERED:
            return
        _said.add(key)
    log.warning(message, *args)
