"""A child process that talks in lines.

Invariant: every process that was started is ended, by its own id, when the test is over.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time

WAIT_SECONDS = 60


class Process:
    """`python -u ARGUMENTS`, or ARGUMENTS themselves without `interpreter`; its output is read in a thread. Variables of the pack are
    not inherited unless given in `env`."""

    def __init__(self, *arguments, env=None, interpreter=True):
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MX_")}
        self.popen = subprocess.Popen(
            [*([sys.executable, "-u"] if interpreter else []), *map(str, arguments)],
            env={**clean, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self.lines = []
        self._queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.popen.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def expect(self, start, seconds=WAIT_SECONDS):
        """The rest of the next line that begins with `start`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._queue.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                raise AssertionError(f"no line {start!r} within {seconds} s:\n" + "\n".join(self.lines[-40:])) from None
            assert line is not None, f"the process ended before {start!r}:\n" + "\n".join(self.lines[-40:])
            self.lines.append(line)
            if line.startswith(start):
                return line.removeprefix(start).strip()

    def tell(self, line):
        """One line to its standard input."""
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def output(self, seconds=WAIT_SECONDS):
        """Everything it printed, once it has ended by itself."""
        self.popen.wait(seconds)
        while (line := self._queue.get(timeout=seconds)) is not None:
            self.lines.append(line)
        return "\n".join(self.lines)

    def signal(self, number):
        os.kill(self.popen.pid, number)

    def end(self):
        """Close its input, which asks it to end; kill it when it does not. A stopped process is continued first."""
        with contextlib.suppress(OSError):
            self.popen.stdin.close()
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
            try:
                self.popen.wait(10)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait(10)
