"""What the demos say while they work, and what they leave."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from pathlib import Path

__all__ = ["Waiting", "keep_records", "say"]


class Waiting:
    """Says every ten seconds that something long goes on."""

    def __init__(self, what: str) -> None:
        self._what, self._stop = what, threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _run(self) -> None:
        started = time.monotonic()
        say(self._what)
        while not self._stop.wait(10):
            print(f"   ... {time.monotonic() - started:.0f} s", flush=True)


def keep_records(scratch: Path, name: str) -> None:
    """Copy the records of a run to where they outlive it, and say what to do with them."""
    folder = Path("build") / name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("records*"):
        old.unlink()
    for path in scratch.glob("records*"):
        shutil.copy(path, folder / path.name)
    mx = Path(sys.executable).parent / "mx"
    say(f"the records are in {folder}; next: {mx} gate {folder}, or {mx} report {folder}")


def say(text: str) -> None:
    print(f"== {text}", flush=True)
