"""Seconds by stage, which stage is going on, and a span for each.

    seconds = Stages()
    with timed(seconds, "plan"):
        ...

Invariant: a stage that raises is timed too. Its span is `mx.plan`, say: see mx_common._spans.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from mx_common._spans import span

__all__ = ["Stages", "timed"]


class Stages(dict[str, float]):
    """Seconds by stage. `current`: the stage that began last, whether or not it has ended; "" before the first."""

    current = ""


@contextlib.contextmanager
def timed(seconds: Stages, stage: str) -> Iterator[None]:
    """Add the seconds that the block takes to `seconds[stage]`."""
    seconds.current = stage
    start = time.perf_counter()
    try:
        with span(f"mx.{stage}"):
            yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start
