"""A real server process of the demo, vLLM's or SGLang's, and what one asks of it.

    with Replica("replica-1", model_folder, environment, log_folder) as replica:
        replica.wait_healthy(180)
        replica.ask("What is the capital of France?")

Invariant: ends the process it started, and its children, however the block is left.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from examples.first_light.engines import LOAD_FORMAT, VLLM, Engine

__all__ = ["Replica", "free_port"]

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


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
        flags: Sequence[str] = LOAD_FORMAT,
        engine: Engine = VLLM,
    ) -> None:
        self.name, self.port = name, free_port()
        self.log = log_folder / f"{name}.log"
        command = engine.command(model, self.port, flags)
        variables = {**os.environ, **engine.environment, **environment}
        self.command = " ".join(command)
        self._out = self.log.open("w")
        # a group, not a session: Linux shares cores between sessions first, and one that decodes without pause can starve another
        self._process = subprocess.Popen(command, env=variables, stdout=self._out, stderr=subprocess.STDOUT, process_group=0)

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
                with urllib.request.urlopen(self.url + "/health", timeout=10):  # SGLang generates a token first
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        raise RuntimeError(f"{self.name} was not healthy after {seconds:.0f} s; {self.log}:\n{self.tail()}")

    def ask(self, question: str, max_tokens: int = 24) -> str:
        """The greedy answer."""
        request = urllib.request.Request(self.url + CHAT, data=_body(question, max_tokens), headers=JSON)
        with urllib.request.urlopen(request, timeout=300) as response:
            answer = json.load(response)
        return str(answer["choices"][0]["message"]["content"])

    @contextlib.contextmanager
    def busy(self, questions: Iterable[str], tokens: int) -> Iterator[None]:
        """Answers of `tokens` tokens are under way inside the block; leaving it drops those that have not come."""
        with contextlib.ExitStack() as stack:
            for question in questions:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
                stack.callback(connection.close)
                connection.request("POST", CHAT, _body(question, tokens, ignore_eos=True), JSON)
            yield

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
        """SIGTERM to the server, which ends its children; then SIGKILL to what is left of the process group this replica made."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(5)
        self._out.close()


def _body(question: str, max_tokens: int, **more: bool) -> bytes:
    messages = [{"role": "user", "content": question}]
    return json.dumps({"model": "demo", "temperature": 0, "max_tokens": max_tokens, "messages": messages, **more}).encode()
