"""A real SGLang server with `--load-format mx`: READY means that it answers, and its load is what its queue and cache say."""

from __future__ import annotations

import json
import subprocess
import urllib.request

import pytest

from tests.support.serving_watch import a_served_replica
from tests.support.sglang_options import PYTHON, SLOTS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LONG = 200


@pytest.mark.parametrize("env", [{}, {"SGLANG_LOAD_SNAPSHOT_USE_ZMQ": "1"}], ids=["one node's writer", "several nodes' writer"])
def test_a_served_replica_is_ready_when_it_answers_and_publishes_its_load(fleet, small_model, env):
    server = fleet.server(small_model[0], env=env)
    port = int(server.url.rpartition(":")[2])
    a_served_replica(server, port, fleet.address, complete, slots=SLOTS, long=LONG)


def test_the_command_line_refuses_the_load_format_without_the_plugin(small_model):
    command = [PYTHON.parent / "sglang", "serve", "--model-path", small_model[0], "--device", "cpu", "--load-format", "mx"]
    done = subprocess.run(
        command, env={"PATH": "/usr/bin:/bin", "SGLANG_PLUGINS": "no-such"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "argument --load-format: invalid choice: 'mx'" in done.stderr


def complete(port, tokens):
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": [5, 17, 99], "sampling_params": sampling}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return len(json.load(answer)["output_ids"])
