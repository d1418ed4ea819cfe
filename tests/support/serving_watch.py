"""A real server of any engine, watched from outside as it starts, works and ends: READY means that it answers, load is its queue and cache.

a_served_replica(process, port, fleet.address, complete)        # complete(port, tokens): one request, the tokens it got
"""

from __future__ import annotations

import concurrent.futures
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

from mx_common.directory import DirectoryClient
from mx_common.wire import p2p
from tests.support.fleet import START_SECONDS

__all__ = ["a_served_replica"]


def a_served_replica(process, port, address, complete, *, slots, long):
    """From its start to its end. `slots`: requests it runs at once; `long`: tokens of a request that takes a while."""
    seen = watch_start(process, port, address)
    statuses = [status for status, _ in seen]
    assert "INITIALIZING" in statuses, "registered before the engine could serve"
    assert statuses[-1] == "READY"
    assert all(health != 200 for status, health in seen if status == "INITIALIZING")
    assert health_within(port, 15) == 200

    assert poll_load(address, lambda load: load == 0.0) == 0.0, "idle is a measured 0, not silence"

    with concurrent.futures.ThreadPoolExecutor(2 * slots) as pool:
        answers = [pool.submit(complete, port, long) for _ in range(2 * slots)]
        assert poll_load(address, lambda load: load == 1.0, pool_busy=answers) == 1.0, "twice as many requests as slots"
        assert all(answer.result() == long for answer in answers)
    assert poll_load(address, lambda load: load == 0.0) == 0.0, "idle again"

    process.popen.terminate()
    process.popen.wait(60)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and "READY" in listed(address):
        time.sleep(0.2)
    assert set(listed(address)) == {"STALE"}, "a replica that was told to end says so"


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
