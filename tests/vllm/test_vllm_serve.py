"""A real `vllm serve --load-format mx`: READY means that it answers, and its load is what its queue and cache say."""

from __future__ import annotations

import json
import shutil
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.support.process import Process
from tests.support.serving_watch import a_served_replica

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SLOTS = 4
LONG = 100


@pytest.fixture
def served(fleet, small_model, free_port):
    """(process, port) of a server that has just been started."""
    command = [shutil.which("vllm", path=str(Path(sys.executable).parent)), "serve", str(small_model[0]), "--load-format", "mx"]
    command += ["--served-model-name", "small", "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager"]
    command += ["--compilation-config", '{"mode": 0, "custom_ops": ["none"]}', "--kv-cache-memory-bytes", "32M"]
    command += ["--max-num-seqs", str(SLOTS), "--max-model-len", "128", "--host", "127.0.0.1", "--port", str(free_port)]
    command += ["--disable-log-stats"]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **fleet.environment}
    process = Process(*command, env=environment, interpreter=False)
    fleet.processes.append(process)
    return process, free_port


def test_a_served_replica_is_ready_when_it_answers_and_publishes_its_load(served, fleet):
    process, port = served
    a_served_replica(process, port, fleet.address, complete, slots=SLOTS, long=LONG)


def complete(port, tokens):
    body = {
        "model": "small",
        "prompt": [5, 17, 99],
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    body |= {"detokenize": False, "return_token_ids": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["usage"]["completion_tokens"]
