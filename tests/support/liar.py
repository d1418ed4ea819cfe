"""A source that claims the identity and the digests of a real one and holds other bytes: what a torn or stale source looks like.

    python -u -m tests.support.liar '{"model": "name", "directory": "127.0.0.1:8001", "worker": "liar", "fault": "kill"}'

Reads the manifest of the oldest READY source of `model`, serves zeros under it as `worker`, and prints `ready`. With `fault` it kills or
stops itself when a reader has its lease: in the middle of what a reader does.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import threading
import time

import numpy as np
import torch

from mx_common.directory import DirectoryClient
from mx_common.directory.worker_client import WorkerClient
from mx_common.load import Job, Loaded, Settings, Source, TensorTable
from mx_common.wire import p2p
from mx_common.wire.identity import identity_from_proto


def when_read(source, number):
    while not source.leases.open_count():
        time.sleep(0.001)
    os.kill(os.getpid(), number)


def main():
    spec = json.loads(sys.argv[1])
    with DirectoryClient(spec["directory"]) as client:
        ref = client.list_sources(model_name=spec["model"], status=p2p.SOURCE_STATUS_READY).instances[0]
        record = client.get_metadata(ref.mx_source_id, ref.worker_id)
    with WorkerClient(record.worker.worker_grpc_endpoint, ref.mx_source_id, ref.worker_id) as worker:
        truth = TensorTable.from_descriptors(worker.get_manifest().tensors)
    tensors = {
        name: torch.zeros([int(n) for n in layout.split("x") if n] or [], dtype=getattr(torch, dtype.removeprefix("torch.")))
        for name, dtype, layout in zip(truth.names, truth.dtype, truth.layout, strict=True)
    }
    assert all(math.prod(t.shape) * t.element_size() == size for t, size in zip(tensors.values(), truth.size, strict=True))

    class Liar(Source):
        def _manifest(self):
            manifest = super()._manifest()
            digests = dict(zip(truth.names, np.asarray(truth.digest).tolist(), strict=True))
            for tensor in manifest.tensors:
                tensor.digest = digests[tensor.name]
            return manifest

    worker = spec.get("worker", "liar")
    job = Job(identity_from_proto(record.identity), worker, 0, 1, "", "cpu", Settings.resolve({"server": spec["directory"]}))
    source = Liar.start(job, Loaded(tensors), ready=lambda: True, serving=None, log=logging.getLogger("liar"))
    assert source.publisher.wait_ready(20)
    if "fault" in spec:
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[spec["fault"]]
        threading.Thread(target=when_read, args=(source, number), daemon=True).start()
    print("ready")
    sys.stdin.read()
    source.close()


if __name__ == "__main__":
    main()
