"""Which process a pid means: a number is given again after its process ended, a start time is not.

    note = started(os.getpid())         # kept beside the pid
    ...
    started(pid) == note                # is it still that process

Invariant: never raises; a process that has ended, or that cannot be seen from here, is the empty text.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["started"]


def started(pid: int) -> str:
    """When a process started, in clock ticks since boot (field 22 of /proc/PID/stat); empty when it does not run."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if len(after_name) < 20 or after_name[0] in "ZX" else after_name[19]
