"""Shows how a transfer advances: a bar on a terminal, a line now and then in a log.

    with TransferProgress("weights from replica-1", total, log, doing.reading()) as shown:
        transport.read(..., progress=shown)

Invariant: showing progress never raises into a transfer.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["TransferProgress"]

_LINE_SECONDS = 10.0


class TransferProgress:
    """Callable `(done_bytes, total_bytes)`, which it passes on to `also`; a context manager that cleans the terminal up."""

    def __init__(self, label: str, total: int, log: logging.Logger, also: Callable[[int, int], None]) -> None:
        self._label, self._total, self._log, self._also = label, total, log, also
        self._last_line = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> TransferProgress:
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

            with contextlib.suppress(Exception):  # a terminal that cannot draw must not cost the load
                self._bar = Progress(
                    TextColumn("{task.description}"),
                    BarColumn(),
                    DownloadColumn(binary_units=True),
                    TransferSpeedColumn(),
                    TimeRemainingColumn(),
                    console=Console(stderr=True),
                    transient=True,
                )
                self._bar.start()
                self._task = self._bar.add_task(self._label, total=self._total)
        return self

    def __call__(self, done: int, total: int) -> None:
        self._also(done, total)
        if self._bar is not None and self._task is not None:
            with contextlib.suppress(Exception):  # as above
                self._bar.update(self._task, completed=done)
        elif time.monotonic() - self._last_line > _LINE_SECONDS:
            self._last_line = time.monotonic()
            self._log.info("%s: %.1f of %.1f GB", self._label, done / 1e9, total / 1e9)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            with contextlib.suppress(Exception):  # as above
                self._bar.stop()
