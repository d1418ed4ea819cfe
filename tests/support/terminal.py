"""A command on a terminal of its own, as a person sees it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess


def watched_on_a_terminal(command: list[str], environment: dict[str, str], *, until: str, columns: int, lines: int = 40) -> str:
    """All that `command` draws until it has drawn `until` three times and is ended by SIGTERM. Checks that it ends as one that was
    interrupted, and that the cursor it hid is back."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command,
        env={**environment, "TERM": "xterm", "COLUMNS": str(columns), "LINES": str(lines)},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = ""
    try:
        while seen.count(until) < 3:
            seen += os.read(ours, 65536).decode(errors="replace")
        process.send_signal(signal.SIGTERM)
        while more := os.read(ours, 65536):
            seen += more.decode(errors="replace")
    except OSError:
        pass  # how a terminal says that its other end is closed
    finally:
        os.close(ours)
    assert process.wait(30) == 130, seen
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")
    return seen
