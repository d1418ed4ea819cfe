"""What the benchmarks share: a source process that serves N equal tensors, and a directory process to find it in.

Invariant: everything is on loopback and ends with the block.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from mx_common.identity import Identity
from mx_common.load import Job, Loaded, Settings, Source

MODEL = "benchmark"
log = logging.getLogger("benchmark")


def job(worker_id: str, server: str, *, verify: bool) -> Job:
    """A load of the benchmark's model on the CPU."""
    settings = Settings.resolve({"server": server, "verify_digest": verify})
    return Job(Identity(model_name=MODEL, dtype="uint8"), worker_id, 0, 1, "benchmark", "cpu", settings)


@contextlib.contextmanager
def source(count: int, nbytes: int, *, digests: bool = True) -> Iterator[tuple[str, int]]:
    """(directory address, process id) of a READY source of `count` tensors of `nbytes` bytes; the directory is a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["MX_RUNTIME_DIR"] = scratch
        with _child("directory") as (_, address):
            spec = {"count": count, "nbytes": nbytes, "server": address, "digests": digests}
            with _child("serve", json.dumps(spec)) as (process, _):
                yield address, process


@contextlib.contextmanager
def _child(role: str, *arguments: str) -> Iterator[tuple[int, str]]:
    """(process id, what it said) of one of the functions below in a process that lives as long as the block."""
    command = [sys.executable, "-m", "benchmarks._fleet", role, *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        # the transport's library may write lines of its own
        while not (line := child.stdout.readline()).startswith("ready "):
            assert line, f"the {role} process ended"
        yield child.pid, line.removeprefix("ready ").strip()
    finally:
        child.stdin.close()
        child.wait(30)


def directory() -> None:
    """A directory, until the input ends."""
    from mx_common.directory import DirectoryServer

    with DirectoryServer("127.0.0.1:0") as server:
        print("ready", server.address, flush=True)
        sys.stdin.read()


def serve(spec: str) -> None:
    """A source, until the input ends."""
    import torch

    given = json.loads(spec)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"t{n}": torch.empty(given["nbytes"], dtype=torch.uint8).random_(generator=generator) for n in range(given["count"])
    }
    served = job("source", given["server"], verify=given["digests"])
    serving = Source.start(served, Loaded(tensors), ready=lambda: True, serving=None, log=log)
    assert serving is not None
    assert serving.publisher is not None
    assert serving.publisher.wait_ready(30)
    print("ready to be read", flush=True)
    sys.stdin.read()
    serving.close()


if __name__ == "__main__":
    {"directory": directory, "serve": serve}[sys.argv[1]](*sys.argv[2:])
