"""Commands that look again and again: one frame after the other, through the absence of a directory, until interrupted.

    view = View(client, server, lambda: fetch(client))
    watch(view, console, 2.0, what=headline_of, draw=table_of, document=document_of, as_json=False)

Invariant: while the directory does not answer, the last answer stays in view, with how old it is and why there is no newer one.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeVar

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live

from mx_common.cli._ask import name_absence
from mx_common.cli._output import cell, line, print_json, show, span
from mx_common.directory.client import DirectoryClient
from mx_common.errors import DirectoryError

__all__ = ["MAX_INTERVAL", "View", "print_frame", "watch"]

MAX_INTERVAL = 86400.0
"""Most seconds between two frames."""

T = TypeVar("T")


@dataclass
class View(Generic[T]):
    """The last answer of a directory, `empty` before the first, and since when there is no newer one."""

    client: DirectoryClient
    server: str | None
    fetch: Callable[[], T]
    answer: T
    error: str = ""
    _heard: float | None = field(default=None, init=False)
    _back_after: float | None = field(default=None, init=False)

    def ask(self) -> None:
        """Raises DirectoryError."""
        self.answer = self.fetch()

    def refresh(self) -> None:
        """Ask once; an unreachable directory is remembered, not raised."""
        try:
            self.ask()
        except DirectoryError as error:
            self.error, self._back_after = str(name_absence(error, self.server)), None
            return
        now = time.monotonic()
        self._back_after = now - self._heard if self.error and self._heard is not None else None
        self.error, self._heard = "", now

    def headline(self, what: str) -> str:
        """`what` is shown, where it comes from, and why it is old."""
        where = f"the directory at {self.client.address}"
        if not self.error:
            back = f" (it is back after {span(self._back_after)})" if self._back_after is not None else ""
            return f"{what} in {where}{back}"
        if self._heard is None:
            return f"waiting for {where}: {self.error}"
        return f"{where} went away; {what} as of {span(time.monotonic() - self._heard)} ago, and still asking: {self.error}"

    def document(self, **content: Any) -> dict[str, Any]:
        """For `--json`: `content` is the last known one when the directory is not reachable."""
        return {"directory": self.client.address, "reachable": not self.error, "error": self.error or None, **content}


def watch(
    view: View[T],
    console: Console,
    interval: float,
    *,
    what: Callable[[T], str],
    draw: Callable[[T, int | None], RenderableType | None],
    document: Callable[[T], dict[str, Any]],
    as_json: bool,
) -> NoReturn:
    """A frame every `interval` seconds; raises KeyboardInterrupt at the end, BadParameter for an interval that is none or above
    `MAX_INTERVAL`. `draw`: an answer, in at most so many lines.

    On a terminal SIGTERM ends it as Ctrl-C does, as one that is left without its cursor is no good to anybody."""
    if not 0 < interval <= MAX_INTERVAL:
        raise typer.BadParameter(f"--interval {interval:g}: give seconds, at most {MAX_INTERVAL:.0f}")
    interrupts = _Interrupts(drawing=console.is_terminal and not as_json)
    if interrupts.drawing:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                view.refresh()
                headline = cell(view.headline(what(view.answer)), "yellow" if view.error else "")
                room = console.height - len(headline.wrap(console, console.width))
                body = draw(view.answer, max(room, 1))
                live.update(headline if body is None else Group(headline, body), refresh=True)
                interrupts.sleep(interval)
    while True:
        view.refresh()
        if as_json:
            print_json(view.document(**document(view.answer)), one_line=True)
        else:
            print_frame(console, f"{time.strftime('%H:%M:%S')} {view.headline(what(view.answer))}", draw(view.answer, None))
        interrupts.sleep(interval)


def print_frame(console: Console, headline: str, body: RenderableType | None) -> None:
    """One frame where nothing is drawn over."""
    line(console, headline)
    if body is not None:
        show(console, body)


class _Interrupts:
    """Ctrl-C ends a watch. Python drops an interrupt that comes while a library's finaliser runs, so that it came is remembered."""

    def __init__(self, drawing: bool) -> None:
        self.drawing, self._came = drawing, False
        for number in (signal.SIGINT, signal.SIGTERM) if drawing else (signal.SIGINT,):
            signal.signal(number, self._on_signal)

    def sleep(self, seconds: float) -> None:
        """Raises KeyboardInterrupt."""
        if self._came:
            raise KeyboardInterrupt
        time.sleep(seconds)

    def _on_signal(self, number: int, frame: object) -> None:
        self._came = True
        raise KeyboardInterrupt
