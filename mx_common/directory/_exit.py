"""Runs a last action when a process ends in an orderly way: normal exit, a multiprocessing child's exit, SIGTERM.

    hook = ExitHook(action)
    hook.remove()

Best effort by nature: SIGKILL runs nothing, and a host that takes SIGTERM over later may end without us. Invariant: the host's
own handling of SIGTERM always happens, after the action: its handler is called, or the default ends the process.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import util
from types import FrameType

__all__ = ["ExitHook"]


class ExitHook:
    """Calls `action` at most once, at exit or on SIGTERM. The action must be bounded in time and must not raise.

    The signal is watched only when this is made in the main thread and the host does not ignore it.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._done = False
        self._pid = os.getpid()
        self._previous: signal.Handlers | Callable[[int, FrameType | None], object] | None = None
        # a priority makes it run at the exit of a plain process and of a multiprocessing child; the latter runs no atexit
        self._finalizer = util.Finalize(None, self._run, exitpriority=20)
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGTERM)
            # None: a handler that Python did not install and cannot call
            if previous not in (None, signal.SIG_IGN):
                self._previous = previous  # type: ignore[assignment]
                signal.signal(signal.SIGTERM, self._on_signal)

    def remove(self) -> None:
        """Forget the action; the signal's earlier handler is put back unless somebody has replaced ours since."""
        self._done = True
        self._finalizer.cancel()
        ours = signal.getsignal(signal.SIGTERM) == self._on_signal
        if ours and self._previous is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous)

    def _run(self) -> None:
        # a forked child has inherited the hook, not the thing it ends
        if not self._done and os.getpid() == self._pid:
            self._done = True
            self._action()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._run()
        if callable(self._previous):
            self._previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
