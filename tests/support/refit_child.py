"""One rank of a trainer, or one toy engine, in a process of its own over real NIXL; told what to do line by line.

    python -u -m tests.support.refit_child '{"role": "trainer", "rank": 0, "world": 2, "model": "toy/refit"}'
    python -u -m tests.support.refit_child '{"role": "engine", "path": "reshard", "model": "toy/refit"}'

A trainer knows `publish VERSION [SEED]`, `update` (before the optimizer steps) and `overwrite SEED`; an engine `update`, `holds SEED` and
`set NAME VALUE`. Each answer is one line that begins with the command's name, or with `failed`.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys

import torch

from mx_common.errors import MxError
from mx_common.refit.engine import RefitJob
from mx_common.refit.held import Held
from mx_common.refit.publisher import Publisher
from mx_common.refit.receiver import Receiver
from tests.support.refit_toy import ToyEngine, checkpoint, expected

made = functools.lru_cache(maxsize=2)(checkpoint)  # random numbers take longer than all the rest of a version


class Rank:
    """This rank's rows of every tensor, in memory that stays where it is."""

    def __init__(self, spec):
        self.rank, self.world = spec["rank"], spec["world"]
        slots = [f"rank{n}" for n in range(self.world)]
        self.publisher = Publisher(
            spec["model"], f"rank{self.rank}", slots, run=spec.get("run", "run-1"), mode=spec.get("mode", "")
        )
        self.memory = {}

    def fill(self, seed):
        held = []
        for name, tensor in made(seed).items():
            parts = tensor.tensor_split(self.world)
            mine = self.memory.setdefault(name, torch.empty_like(parts[self.rank]))
            mine.copy_(parts[self.rank])
            start = (sum(part.shape[0] for part in parts[: self.rank]), *[0] * (tensor.dim() - 1))
            held.append(Held(name, tuple(tensor.shape), start, mine))
        return held

    def publish(self, version, seed=None):
        return json.dumps(self.publisher.publish(int(version), self.fill(int(seed or version))).seconds)

    def update(self):
        return str(self.publisher.before_update())

    def overwrite(self, seed):
        self.fill(int(seed))
        return seed

    def close(self):
        self.publisher.close()


class Engine:
    """A toy engine and its receiver."""

    def __init__(self, spec):
        self.engine = ToyEngine(spec.get("rank", 0), spec.get("world", 1))
        job = RefitJob(
            spec["model"],
            f"engine-{os.getpid()}",
            path=spec["path"],
            rank=self.engine.rank,
            world=self.engine.world,
            engine="toy",
            framework="toy",
        )
        self.receiver = Receiver(job, self.engine, logging.getLogger("toy"))

    def update(self, version=None):
        done = self.receiver.update(None if version is None else int(version))
        return json.dumps(
            {"version": done.version, "wire_bytes": done.wire_bytes, "verdict": done.verdict, "seconds": done.seconds}
        )

    def holds(self, seed):
        wanted = expected(int(seed), self.engine.rank, self.engine.world)
        return str(all(torch.equal(self.engine.parameters()[name], tensor) for name, tensor in wanted.items()))

    def set(self, name, value):
        os.environ[name] = value
        return name

    def close(self):
        self.receiver.close()


def main():
    spec = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    actor = Rank(spec) if spec["role"] == "trainer" else Engine(spec)
    print("started", os.getpid())
    for line in sys.stdin:
        name, *arguments = line.split()
        try:
            print(name, getattr(actor, name)(*arguments))
        except MxError as error:
            print("failed", type(error).__name__, error)
    actor.close()


if __name__ == "__main__":
    main()
