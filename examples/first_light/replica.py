"""A real `vllm serve` process of the demo, and what one asks of it.

    with Replica("replica-1", model_folder, environment, log_folder) as replica:
        replica.wait_healthy(180)
        replica.ask("What is the capital of France?")

Invariant: ends the process it started, and its children, however the block is left.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

__all__ = ["SLOTS", "Replica", "free_port"]

SLOTS = 4
# One of the fused CPU kernels of this vLLM build is inexact in bfloat16; plain torch operations give the same tokens as transformers.
CPU_FLAGS = ["--enforce-eager", "--compilation-config", '{"mode": 0, "custom_ops": ["none"]}']
SMALL_FLAGS = ["--kv-cache-memory-bytes", "256M", "--max-num-seqs", str(SLOTS), "--max-model-len", "1024"]


def free_port() -> int:
    """A TCP port on loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Replica:
    """One server; its output goes to `log_folder/NAME.log`."""

    def __init__(
        self,
        name: str,
        model: Path,
        environment: dict[str, str],
        log_folder: Path,
        flags: Sequence[str] = ("--load-format", "mx"),
    ) -> None:
        self.name, self.port = name, free_port()
        self.log = log_folder / f"{name}.log"
        command = [
            str(Path(sys.executable).parent / "vllm"),
            "serve",
            str(model),
            *flags,
            "--served-model-name",
            "demo",
        ]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *CPU_FLAGS, *SMALL_FLAGS]
        self.command = " ".join(command)
        self._out = self.log.open("w")
        self._process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=self._out, stderr=subprocess.STDOUT, start_new_session=True
        )

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_healthy(self, seconds: float) -> None:
        """Until /health answers 200. Raises RuntimeError with the end of the log when the server dies or takes longer."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with code {self._process.returncode}; {self.log}:\n{self.tail()}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        raise RuntimeError(f"{self.name} was not healthy after {seconds:.0f} s; {self.log}:\n{self.tail()}")

    def ask(self, question: str, max_tokens: int = 24) -> str:
        """The greedy answer."""
        body = {
            "model": "demo",
            "temperature": 0,
            "max_tokens": max_tokens,
            "messages": [{"role": "user", "content": question}],
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            data=json.dumps({**body, "ignore_eos": max_tokens > 100}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            answer = json.load(response)
        return str(answer["choices"][0]["message"]["content"])

    @property
    def url(self) -> str:
        """Of its HTTP server."""
        return f"http://127.0.0.1:{self.port}"

    def load_line(self) -> tuple[str, float]:
        """("storage" or "worker ID", seconds) as the replica's log states it."""
        found = re.search(r"weights of \S+ from (storage|worker \w+) in ([0-9.]+) s", self.log.read_text(errors="replace"))
        if found is None:
            raise RuntimeError(f"{self.name} does not say where its weights came from; {self.log}:\n{self.tail()}")
        return found[1], float(found[2])

    def tail(self, lines: int = 25) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to the process group this replica made."""
        for number, patience in ((signal.SIGTERM, 15), (signal.SIGKILL, 5)):
            if self._process.poll() is None:
                os.killpg(self._process.pid, number)
                try:
                    self._process.wait(patience)
                except subprocess.TimeoutExpired:
                    continue
        self._out.close()
