"""What the benchmarks share: a source process that serves N equal tensors, and a directory to find it in.

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
    """(directory address, process id) of a READY source of `count` tensors of `nbytes` bytes."""
    from mx_common.directory import DirectoryServer

    with tempfile.TemporaryDirectory() as scratch, DirectoryServer("127.0.0.1:0") as server:
        os.environ["MX_RUNTIME_DIR"] = scratch
        spec = json.dumps({"count": count, "nbytes": nbytes, "server": server.address, "digests": digests})
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._fleet", spec], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            while (line := child.stdout.readline()) != "ready\n":  # the transport's library may write lines of its own
                assert line, "the source ended"
            yield server.address, child.pid
        finally:
            child.stdin.close()
            child.wait(30)


def serve(count: int, nbytes: int, server: str, digests: bool) -> None:
    """The child: serve until the input ends."""
    import torch

    generator = torch.Generator().manual_seed(1)
    tensors = {f"t{n}": torch.empty(nbytes, dtype=torch.uint8).random_(generator=generator) for n in range(count)}
    serving = Source.start(job("source", server, verify=digests), Loaded(tensors), ready=lambda: True, serving=None, log=log)
    assert serving is not None
    assert serving.publisher is not None
    assert serving.publisher.wait_ready(30)
    print("ready", flush=True)
    sys.stdin.read()
    serving.close()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    serve(given["count"], given["nbytes"], given["server"], given["digests"])
