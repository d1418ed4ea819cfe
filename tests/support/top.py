"""`mx top` beside a test, as somebody who watches what the test does sees it."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from tests.support.process import WAIT_SECONDS, Process

MX = Path(sys.executable).parent / "mx"


class Top:
    """Frames of `mx top --json`. A context manager that ends it."""

    def __init__(self, address):
        self._process = Process(
            MX, "top", "--json", "--interval", "0.1", "--server", address, env={"MX_RPC_TIMEOUT": "10"}, interpreter=False
        )

    def until(self, seen, what):
        """The first frame from now on for which `seen` is true."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            frame = json.loads("{" + self._process.expect("{"))
            if seen(frame):
                return frame
        raise AssertionError(f"never seen: {what}; last {frame}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.popen.kill()
        self._process.popen.wait(WAIT_SECONDS)


class Gate:
    """A fault of an in-process transport that lets one piece after another pass, as a test says."""

    def __init__(self):
        self._pass = threading.Semaphore(0)

    def __call__(self, done):
        assert self._pass.acquire(timeout=WAIT_SECONDS), "the test ended without opening its gate"

    def open(self, pieces):
        self._pass.release(pieces)
