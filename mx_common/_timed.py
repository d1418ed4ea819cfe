"""Seconds by stage.

    with timed(seconds, "plan"):
        ...

Invariant: a stage that raises is timed too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

__all__ = ["timed"]


@contextlib.contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the seconds that the block takes to `seconds[stage]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start
