"""A real `vllm serve --load-format mx`: READY means that it answers, and its load is what its queue and cache say."""

from __future__ import annotations

import concurrent.futures
import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from mx_common.directory import DirectoryClient
from mx_common.wire import p2p
from tests.support.process import Process
from tests.vllm.conftest import START_SECONDS

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
    seen = watch_start(process, port, fleet.address)
    statuses = [status for status, _ in seen]
    assert "INITIALIZING" in statuses, "registered before the engine could serve"
    assert statuses[-1] == "READY"
    assert all(health != 200 for status, health in seen if status == "INITIALIZING")
    assert health_within(port, 15) == 200

    assert poll_load(fleet.address, lambda load: load == 0.0) == 0.0, "idle is a measured 0, not silence"

    with concurrent.futures.ThreadPoolExecutor(2 * SLOTS) as pool:
        answers = [pool.submit(complete, port, LONG) for _ in range(2 * SLOTS)]
        assert poll_load(fleet.address, lambda load: load == 1.0, pool_busy=answers) == 1.0, "8 requests for 4 slots"
        assert all(answer.result() == LONG for answer in answers)
    assert poll_load(fleet.address, lambda load: load == 0.0) == 0.0, "idle again"

    process.signal(15)
    process.popen.wait(60)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and "READY" in listed(fleet.address):
        time.sleep(0.2)
    assert listed(fleet.address) == ["STALE"], "a replica that was told to end says so"


# Helpers ---------------------------------------------------------------------------------------------------------------


def watch_start(process, port, address):
    """(source status, status of /health) each time either changes, until the source is READY."""
    seen = []
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.popen.poll() is None, "\n".join(process.lines[-30:])
        health = health_status(port)
        now = (next(iter(listed(address)), "absent"), health)
        if not seen or seen[-1] != now:
            seen.append(now)
        if now[0] == "READY":
            return seen
        time.sleep(0.1)
    raise AssertionError(f"not READY: {seen}")


def listed(address):
    with DirectoryClient(address) as client:
        return [p2p.SourceStatus.Name(ref.status).removeprefix("SOURCE_STATUS_") for ref in client.list_sources().instances]


def health_status(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return answer.status
    except (urllib.error.URLError, OSError):
        return None


def health_within(port, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and health_status(port) != 200:
        time.sleep(0.1)
    return health_status(port)


def poll_load(address, wanted, pool_busy=(), seconds=40):
    """The source's load as another process sees it through ListSources, once it is as wanted."""
    program = (
        "import sys, json\nfrom mx_common.directory import DirectoryClient\n"
        "refs = DirectoryClient(sys.argv[1]).list_sources().instances\n"
        "print(json.dumps([ref.source_load if ref.HasField('source_load') else None for ref in refs]))"
    )
    deadline = time.monotonic() + seconds
    seen = []
    while time.monotonic() < deadline:
        done = subprocess.run([sys.executable, "-c", program, address], capture_output=True, text=True, check=True)
        (load,) = json.loads(done.stdout)
        seen.append(load)
        if load is not None and wanted(load):
            return load
        assert not pool_busy or not all(answer.done() for answer in pool_busy), f"the requests ended before; loads seen: {seen}"
    raise AssertionError(f"loads seen: {seen}")


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
