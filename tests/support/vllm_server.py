"""A real `vllm serve` on the CPU, and what one asks of it.

server = VllmServer(model_folder, port, env=fleet.environment)
server.wait_healthy()
server.tokens(prompts)          # greedy
server.end()
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.http_server import HttpServer
from tests.support.vllm_model import NEW_TOKENS

__all__ = ["VllmServer"]

NAME = "small"
SLOTS = 4
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class VllmServer(HttpServer):
    """`flags` are added to those of a small model."""

    def __init__(self, model, port, *flags, env=None, load_format="mx"):
        command = [Path(sys.executable).parent / "vllm", "serve", model, "--load-format", load_format]
        command += ["--served-model-name", NAME, "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager"]
        command += ["--compilation-config", '{"mode": 0, "custom_ops": ["none"]}', "--kv-cache-memory-bytes", "32M"]
        command += ["--max-num-seqs", SLOTS, "--max-model-len", "128", "--host", "127.0.0.1", "--port", port]
        command += ["--disable-log-stats", *flags]
        super().__init__(command, f"http://127.0.0.1:{port}", {**ENVIRONMENT, **(env or {})})

    def tokens(self, prompts, max_new_tokens=NEW_TOKENS):
        """The greedy tokens, one list a prompt."""
        limits = {"max_tokens": max_new_tokens, "min_tokens": max_new_tokens, "ignore_eos": True, "temperature": 0}
        how = {"detokenize": False, "return_token_ids": True}
        answer = self.post("/v1/completions", {"model": NAME, "prompt": prompts, **limits, **how})
        return [choice["token_ids"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]

    def weight_version(self):
        return self.get("/weight_info")["weight_version"]
