"""A process that serves the toy model, and misbehaves as told.

    python -u -m tests.support.toy_source '{"worker_id": "w1", "seed": 1, "fault": "kill", "after": 0.2}'

Prints `ready WORKER_ID` once the directory lists it, then waits for the end of its input. Prints `leased` when the first read
lease was granted. Faults: "kill", "stop" (SIGSTOP), "overwrite", "revoke" (its leases): `after` seconds after that; "manifest":
the manifest is changed as `edit` says before it is served.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time

from mx_common.load import Loaded, Source
from tests.support.toy import content, job

EDITS = {
    "missing": lambda manifest: manifest.tensors.pop(0),
    "extra": lambda manifest: manifest.tensors.add(name="ghost", addr=manifest.tensors[0].addr, size=8, dtype="torch.uint8"),
    "resized": lambda manifest: setattr(manifest.tensors[1], "size", manifest.tensors[1].size - 2),
    "retyped": lambda manifest: setattr(manifest.tensors[1], "dtype", "torch.float16"),
    "relaid": lambda manifest: setattr(manifest.tensors[1], "layout", "3x5"),
    "zero-byte": lambda manifest: setattr(manifest.tensors[1], "size", 0),
    "duplicate": lambda manifest: manifest.tensors.add().CopyFrom(manifest.tensors[0]),
    "nameless": lambda manifest: setattr(manifest.tensors[1], "name", ""),
    "digest": lambda manifest: setattr(manifest.tensors[1], "digest", 7),
    "no-digests": lambda manifest: [tensor.ClearField("digest") for tensor in manifest.tensors],
    "elsewhere": lambda manifest: setattr(manifest.tensors[1], "addr", 4096),
    "empty-extra": lambda manifest: manifest.tensors.add(name="empty", size=0, dtype="torch.uint8"),
}


class EditedSource(Source):
    """A source whose manifest is changed before it is served."""

    edits = ()

    def _manifest(self):
        manifest = super()._manifest()
        for edit in self.edits:
            edit(manifest)
        return manifest


def main():
    spec = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    tensors = content(spec["seed"], spec.get("count", 8), spec.get("nbytes", 1 << 20))
    mine = job(spec["worker_id"], rank=spec.get("rank", 0), server=spec.get("server", ""))
    EditedSource.edits = tuple(EDITS[name] for name in spec.get("edit", "").split() if name)
    never = threading.Event()
    ready = (lambda: True) if spec.get("ready", True) else never.is_set
    source = EditedSource.start(mine, Loaded(tensors), ready=ready, serving=None, log=logging.getLogger("toy"))
    assert source is not None
    if spec.get("ready", True):
        assert source.publisher.wait_ready(30)
        print("ready", spec["worker_id"])
    else:
        while not source.publisher.mx_source_id:
            time.sleep(0.02)
        print("registered", spec["worker_id"])
    threading.Thread(target=misbehave, args=(source, tensors, spec), daemon=True).start()
    for line in sys.stdin:
        if line.strip() == "exit":
            break
    source.close()
    print("closed")


def misbehave(source, tensors, spec):
    while source.leases.open_count() == 0:
        time.sleep(0.002)
    print("leased")
    if "fault" not in spec:
        return
    time.sleep(spec.get("after", 0.2))
    print("fault", spec["fault"])
    if spec["fault"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif spec["fault"] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif spec["fault"] == "overwrite":
        for tensor in tensors.values():
            tensor.zero_()
    elif spec["fault"] == "revoke":
        source.leases.revoke()


if __name__ == "__main__":
    main()
