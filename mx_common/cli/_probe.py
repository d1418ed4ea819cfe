"""Runs a part of `mx doctor` in a process of its own, for a bounded time.

    with Probe("nixl") as probe:
        findings, trouble = probe.wait(deadline)

Invariant: the process and what it started are gone when the block ends, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

__all__ = ["Probe"]

_LAST_WORDS = 300


class Probe:
    """One run of `mx_common.cli._probe_child`, started at once."""

    def __init__(self, role: str) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the block ends)
        self._started = time.monotonic()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "mx_common.cli._probe_child", role],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,
        )

    def wait(self, patience: float) -> tuple[list[dict[str, Any]], str]:
        """(findings, what went wrong or ""). `patience`: seconds the whole probe may take, from its start."""
        timed_out = False
        try:
            out, _ = self._child.communicate(timeout=max(self._started + patience - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            timed_out = True
            self._kill()
            out, _ = self._child.communicate()
        findings, step = [], "starting"
        for text in out.decode("utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # the line that a killed process was writing
                said = json.loads(text)
                step = said.get("step", step)
                if "step" not in said:
                    findings.append(said)
        if timed_out:
            return findings, f"{step} took more than {patience:g} s and was ended"
        code = self._child.returncode
        if code == 0:
            return findings, ""
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return findings, f"{step} ended with {how}: {self._last_words() or 'it said nothing'}"

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()
        self._said.close()

    def _kill(self) -> None:
        if self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode("utf-8", errors="replace").strip().splitlines()
        return lines[-1][-_LAST_WORDS:] if lines else ""
