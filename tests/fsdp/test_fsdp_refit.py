"""From optimizer step to receiver: real FSDP2 ranks publish, and what arrives by either path is the full state dict of that step."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

import torch

from mx_common.directory import DirectoryServer
from mx_common.refit.capture import capture
from mx_common.refit.engine import RefitJob
from mx_common.refit.receiver import Receiver
from tests.support.process import Process

CHILD = Path(__file__).parent / "fsdp_refit_child.py"
VERSIONS = 3


class Collector:
    """An engine whose parameters are the checkpoint's tensors."""

    refused = ""

    def __init__(self, state):
        self._params = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        self.serving = None

    def parameters(self):
        return self._params

    def derived(self):
        return ()

    def capture(self, tensors):
        twin = {name: torch.empty_like(p, device="meta") for name, p in self._params.items()}
        return capture(lambda stream: self._load(twin, stream), twin, tensors)

    def load(self, tensors):
        self._load(self._params, tensors)

    def paused(self):
        return contextlib.nullcontext()

    def installed(self, version):
        self.serving = version

    def refuse(self, reason):
        raise AssertionError(reason)

    def _load(self, params, stream):
        for name, tensor in stream:
            params[name].data.copy_(tensor)


def test_every_version_of_a_real_trainer_arrives_bit_for_bit_by_either_path(tmp_path, monkeypatch):
    monkeypatch.setenv("MX_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("MX_RECORDS_FILE", str(tmp_path / "records.jsonl"))
    with DirectoryServer("127.0.0.1:0") as server:
        environment = {"MX_SERVER_ADDRESS": server.address, "MX_RUNTIME_DIR": str(tmp_path / "run")}
        child = Process(CHILD, tmp_path, VERSIONS, env={"PYTHONPATH": os.pathsep.join(sys.path), **environment})
        receivers = []
        try:
            for version in range(1, VERSIONS + 1):
                child.expect(f"published {version}")
                child.expect(f"published {version}")
                state = torch.load(tmp_path / f"full-{version}.pt")
                if not receivers:
                    for path in ("reshard", "staged"):
                        job = RefitJob("tiny/llama", path, path=path, engine="test", framework="fsdp", server=server.address)
                        receivers.append(Receiver(job, Collector(state), logging.getLogger(__name__)))
                for receiver in receivers:
                    done = receiver.update(version)
                    assert (done.version, done.path, done.verified, done.unused) == (version, receiver.job.path, True, ())
                    assert receiver.engine.serving == version
                    assert [n for n, t in receiver.engine.parameters().items() if not torch.equal(t, state[n])] == []
                (tmp_path / f"go-{version}").touch()
            child.expect("done")
        finally:
            for receiver in receivers:
                receiver.close()
            child.end()
