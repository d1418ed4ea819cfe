"""A real `sglang serve` in SGLang's own environment, on the CPU, and what one asks of it.

server = SglangServer(model_folder, port, env=fleet.environment, load_format="mx", tp=2)
server.wait_healthy()
server.tokens()          # greedy, for the prompts of `vllm_model`
server.end()
"""

from __future__ import annotations

import json

from tests.support.http_server import HttpServer
from tests.support.sglang_options import PYTHON, SAMPLING, environment, options
from tests.support.vllm_model import PROMPTS

__all__ = ["SglangServer"]


class SglangServer(HttpServer):
    """`more` are options of the server by their names in `sglang.Engine`: `load_format`, `tp`, `extra`, and any other."""

    def __init__(self, model, port, *, env=None, tp=1, **more):
        flags = as_flags(options(model, tp=tp, host="127.0.0.1", port=port, **more))
        command = [PYTHON.parent / "sglang", "serve", *flags]
        super().__init__(command, f"http://127.0.0.1:{port}", {**environment(tp), **(env or {})})

    def generate(self, prompts=PROMPTS, **sampling):
        """SGLang's answers, one a prompt, whole."""
        return self.post("/generate", {"input_ids": prompts, "sampling_params": {**SAMPLING, **sampling}})

    def tokens(self, prompts=PROMPTS, **sampling):
        """The greedy tokens, one list a prompt."""
        return [answer["output_ids"] for answer in self.generate(prompts, **sampling)]

    def weight_version(self):
        return self.generate(PROMPTS)[0]["meta_info"]["weight_version"]


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
