"""A small real model for the tests of `mx_common.load`: torch tensors whose content follows from a seed, and a storage that may be empty.

It stands for an inference engine's model at the seam `mx_common.load.EngineModel`; directory, leases, NIXL and memory are real.
"""

from __future__ import annotations

import gc
import logging
import weakref

import torch

from mx_common.identity import Identity
from mx_common.load import Job, Settings

log = logging.getLogger("tests.toy")

MODEL = "toy/model"


def content(seed, count, nbytes):
    """`count` tensors of `nbytes` bytes, as bfloat16; the last one short and odd-sized, as real models have them."""
    tensors = {}
    for number in range(count):
        size = nbytes if number < count - 1 else 1 + nbytes // 7
        generator = torch.Generator().manual_seed(seed * 1000 + number)
        words = torch.empty((size + 7) // 8, dtype=torch.int64).random_(generator=generator)
        data = words.view(torch.uint8)[:size].clone()
        tensors[f"layers.{number}.weight"] = data.view(torch.bfloat16) if size % 2 == 0 else data
    return tensors


class ToyEngine:
    """Counts what the pack asks of it, and fails the test that makes it hold two models."""

    def __init__(self, count=8, nbytes=1 << 20, storage_seed=None):
        self.count, self.nbytes, self.storage_seed = count, nbytes, storage_seed
        self.built = self.discarded = self.from_storage = 0
        self.model = None
        self._alive = []

    def build(self):
        self.built += 1
        return self._hold({name: torch.full_like(t, 0) for name, t in content(0, self.count, self.nbytes).items()})

    def discard(self):
        self.discarded += 1
        self.model = None
        gc.collect()

    def load_from_storage(self):
        if self.storage_seed is None:
            raise FileNotFoundError("no weight files in /models/toy")
        self.from_storage += 1
        return self._hold(content(self.storage_seed, self.count, self.nbytes))

    def _hold(self, tensors):
        gc.collect()
        alive = sum(1 for ref in self._alive if ref() is not None)
        assert self.model is None, "a second model was asked for while the first is in use"
        assert alive == 0, f"{alive} tensors of an earlier model are still in memory"
        self.model = tensors
        self._alive = [weakref.ref(t) for t in tensors.values()]
        return tensors


def job(worker_id, *, rank=0, model=MODEL, accelerator="cpu", refused="", **settings):
    """A load of the toy model; `settings` override the environment as an engine's extra configuration does."""
    identity = Identity(model_name=model, backend_framework=1, dtype="bfloat16")
    return Job(identity, worker_id, rank, 1, "toy", accelerator, Settings.resolve(settings), refused)


def holds(tensors, seed, count=8, nbytes=1 << 20):
    """Whether `tensors` are the content of `seed`, byte for byte."""
    wanted = content(seed, count, nbytes)
    return tensors.keys() == wanted.keys() and all(
        torch.equal(t.view(torch.uint8), wanted[name].view(torch.uint8)) for name, t in tensors.items()
    )


class policy_that_prefers:
    """Registers the policy "prefer", which tries `worker_id` first."""

    def __init__(self, worker_id):
        self.worker_id = worker_id

    def order(self, candidates, target):
        return sorted(candidates, key=lambda candidate: candidate.worker_id != self.worker_id)

    def __enter__(self):
        from mx_common.selection import register_selector

        register_selector("prefer", lambda: self)

    def __exit__(self, *_):
        pass
