"""A child process that talks in lines.

Invariant: every process that was started is ended, by its own id or its group's, when the test is over.
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
    """`python -u ARGUMENTS` with this Python or the `interpreter` given, or ARGUMENTS themselves without one; its output is read in a
    thread. Variables of the pack are not inherited unless given in `env`. With `group` it leads a process group: signals and the end
    reach its children too."""

    def __init__(self, *arguments, env=None, interpreter=True, group=False):
        python = sys.executable if interpreter is True else interpreter
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MX_")}
        self.group = group
        self.popen = subprocess.Popen(
            [*([str(python), "-u"] if python else []), *map(str, arguments)],
            env={**clean, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0 if group else None,  # not a session: see examples.first_light.replica
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

    def failure(self, seconds=WAIT_SECONDS):
        """Everything it printed, once it has ended with an error."""
        said = self.output(seconds)
        assert self.popen.returncode != 0, said
        return said

    def said(self):
        """Everything it printed so far; `expect` looks at what comes after."""
        with contextlib.suppress(queue.Empty):
            while (line := self._queue.get_nowait()) is not None:
                self.lines.append(line)
            self._queue.put(None)
        return "\n".join(self.lines)

    def signal(self, number):
        (os.killpg if self.group else os.kill)(self.popen.pid, number)

    def end(self):
        """Close its input, which asks it to end; kill it when it does not. A stopped process is continued first."""
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
        self.ask_to_end()
        try:
            self.popen.wait(10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait(10)
        if self.group:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)

    def ask_to_end(self):
        with contextlib.suppress(OSError):
            self.popen.stdin.close()
