"""Trainers run once for all tests; what each rank held is read back and put together here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.support.process import Process

HERE = Path(__file__).parent
RUN_SECONDS = 240


class Run:
    """What the ranks of one world wrote down."""

    def __init__(self, folder, world):
        self.world = world
        self.ranks = [torch.load(folder / f"{world}-{rank}.pt", weights_only=False) for rank in range(world)]

    def facts(self, case):
        return [rank[case]["facts"] for rank in self.ranks]

    def held(self, case, moment):
        """Per rank: [(name, shape, start, tensor, address)]."""
        return [rank[case][moment]["held"] for rank in self.ranks]

    def full(self, case, moment):
        return self.ranks[0][case][moment]["full"]

    def moments(self, case):
        return [moment for moment in self.ranks[0][case] if moment != "facts"]


@pytest.fixture(scope="session")
def fsdp_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    child = Process(HERE / "fsdp_child.py", folder, env={"PYTHONPATH": ":".join(sys.path)})
    try:
        child.expect("done", RUN_SECONDS)
    finally:
        child.end()
    return {world: Run(folder, world) for world in (2, 4)}
