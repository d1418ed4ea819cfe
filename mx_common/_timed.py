"""Seconds by stage, which stage is going on, and a span for each.

    seconds = Stages()
    with timed(seconds, "plan"):
        ...

Invariant: a stage that raises is timed too. Its span is `mx.plan`, say, of the first `SPANS` times: see mx_common._spans.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator

from mx_common._spans import span

__all__ = ["Stages", "timed"]


SPANS = 8
"""Of a stage that comes again and again, as in a refit of many rounds: more would crowd out the spans of others."""


class Stages(dict[str, float]):
    """Seconds by stage. `current`: the stage that began last, whether or not it has ended; "" before the first. `times`: how often each
    began."""

    current = ""

    def __init__(self) -> None:
        super().__init__()
        self.times: Counter[str] = Counter()


@contextlib.contextmanager
def timed(seconds: Stages, stage: str) -> Iterator[None]:
    """Add the seconds that the block takes to `seconds[stage]`."""
    seconds.current = stage
    seconds.times[stage] += 1
    start = time.perf_counter()
    try:
        with span(f"mx.{stage}") if seconds.times[stage] <= SPANS else contextlib.nullcontext():
            yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start
