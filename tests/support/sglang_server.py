"""A real `sglang serve` in SGLang's own environment, on the CPU, and what one asks of it.

    server = SglangServer(model_folder, port, env=fleet.environment, load_format="mx", tp=2)
    server.wait_healthy()
    server.tokens()          # greedy, for the prompts of `vllm_model`
    server.end()

Invariant: `end` leaves none of its processes behind.
"""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request

from tests.support.process import Process
from tests.support.sglang_options import PYTHON, SAMPLING, environment, options
from tests.support.vllm_model import PROMPTS

__all__ = ["SglangServer"]

# a machine on which other engines run is slow to import one
START_SECONDS = 300


class SglangServer(Process):
    """`more` are options of the server by their names in `sglang.Engine`: `load_format`, `tp`, `extra`, and any other."""

    def __init__(self, model, port, *, env=None, tp=1, **more):
        self.url = f"http://127.0.0.1:{port}"
        flags = as_flags(options(model, tp=tp, host="127.0.0.1", port=port, **more))
        command = [PYTHON.parent / "sglang", "serve", *flags]
        super().__init__(*command, env={**environment(tp), **(env or {})}, interpreter=False, group=True)

    def health(self):
        """The status of /health; None when nobody answers."""
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=30) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def wait_healthy(self, seconds=START_SECONDS):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.popen.poll() is None, "the server ended:\n" + self.said()[-6000:]
            if self.health() == 200:
                return self
            time.sleep(0.3)
        raise AssertionError(f"not healthy after {seconds} s:\n" + self.said()[-6000:])

    def post(self, path, body=None, seconds=120):
        """The answer. An HTTP error is raised as AssertionError with the server's words."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body or {}).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} answers {error.code}: {error.read().decode()}") from None
        return json.loads(text) if text.startswith(("{", "[")) else text

    def get(self, path, seconds=30):
        with urllib.request.urlopen(self.url + path, timeout=seconds) as answer:
            return json.load(answer)

    def generate(self, prompts=PROMPTS, **sampling):
        """SGLang's answers, one a prompt, whole."""
        return self.post("/generate", {"input_ids": prompts, "sampling_params": {**SAMPLING, **sampling}})

    def tokens(self, prompts=PROMPTS, **sampling):
        """The greedy tokens, one list a prompt."""
        return [answer["output_ids"] for answer in self.generate(prompts, **sampling)]

    def ask_to_end(self):
        """To the server alone, which ends its own children."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        super().ask_to_end()


def as_flags(given):
    """{"tp_size": 2, "sleep_on_idle": True} as ["--tp-size", "2", "--sleep-on-idle"]; what is False or None is left out."""
    flags = []
    for name, value in given.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return flags
