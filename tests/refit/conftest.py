"""A directory, a trainer of a few ranks in this process, and toy engines that receive from it over the in-process transport.

Directory, manifests, leases and versions are real gRPC; the transport copies memory within the process (NIXL has tests of its own, and
tests/refit/test_refit_processes.py runs the same over it).
"""

from __future__ import annotations

import logging

import pytest
import torch

from mx_common.refit.engine import RefitJob
from mx_common.refit.held import Held
from mx_common.refit.publisher import Publisher
from mx_common.refit.receiver import Receiver
from mx_common.transport.local import LocalTransport
from tests.support.refit_hosts import being_read, child, two_hosts  # noqa: F401  fixtures
from tests.support.refit_toy import ToyEngine, checkpoint
from tests.support.scrape import page  # noqa: F401  a fixture

MODEL = "toy/refit"


@pytest.fixture(autouse=True)
def _own_corner(monkeypatch, tmp_path):
    """Nothing of the machine's own settings, files or ports is used."""
    monkeypatch.setenv("MX_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("MX_RECORDS_FILE", str(tmp_path / "records.jsonl"))
    monkeypatch.setenv("MX_RPC_TIMEOUT", "5")
    monkeypatch.setenv("MX_REFIT_WAIT_SECONDS", "5")
    monkeypatch.setenv("MX_PUBLISH_WAIT_SECONDS", "1")


class Trainer:
    """`world` ranks, each with its rows of every tensor, or of those whose names `columns` accepts its columns."""

    def __init__(self, world=2, *, run="run-1", dtype=torch.bfloat16, columns=lambda name: False, mode="in_place", opener=None):
        self.slots = [f"rank{n}" for n in range(world)]
        self.dtype, self.columns = dtype, columns
        self.memory = [{} for _ in self.slots]
        self.ranks = [
            Publisher(MODEL, slot, self.slots, run=run, mode=mode, opener=opener or (lambda name: LocalTransport(name)))
            for slot in self.slots
        ]

    def held(self, seed, rank):
        """This rank's boxes of a version; a rank keeps its memory from one version to the next."""
        parts = []
        for name, tensor in checkpoint(seed, self.dtype).items():
            dim = 1 if self.columns(name) and tensor.dim() > 1 else 0
            pieces = tensor.tensor_split(len(self.slots), dim)
            begin = sum(piece.shape[dim] for piece in pieces[:rank])
            mine = self.memory[rank].setdefault(name, torch.empty(0, dtype=self.dtype))
            if mine.shape != pieces[rank].shape:
                mine = self.memory[rank][name] = torch.empty_like(pieces[rank], memory_format=torch.contiguous_format)
            mine.copy_(pieces[rank])
            start = tuple(begin if d == dim else 0 for d in range(tensor.dim()))
            parts.append(Held(name, tuple(tensor.shape), start, mine))
        return parts

    def publish(self, version, seed=None, ranks=None, change=lambda rank, held: held):
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            held = change(rank, self.held(version if seed is None else seed, rank))
            self.ranks[rank].publish(version, held)

    def before_update(self):
        done = [rank.before_update() for rank in self.ranks]  # every rank, whatever the first says
        return all(done)

    def close(self):
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def trainer(directory):
    """Starts trainers; they are closed at the end."""
    made = []

    def start(*args, **kwargs):
        made.append(Trainer(*args, **kwargs))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture
def receive(directory):
    """Makes (engine, receiver) pairs; receivers are closed at the end. `opened`: the transports they opened, in order."""
    made = []

    def start(path="reshard", rank=0, world=1, *, engine=None, fault=None, **job):
        engine = engine or ToyEngine(rank, world)
        facts = RefitJob(MODEL, f"engine-{len(made)}", path=path, rank=rank, world=world, engine="toy", framework="toy", **job)
        log = logging.getLogger("tests.refit")
        made.append(Receiver(facts, engine, log, opener=lambda name: opened(LocalTransport(name, fault=fault))))
        return engine, made[-1]

    def opened(transport):
        start.opened.append(transport)
        return transport

    start.opened = []
    yield start
    for one in made:
        one.close()
