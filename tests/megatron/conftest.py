"""What real Megatron ranks held and computed, run once for all tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.megatron.cases import CASES
from tests.support.process import Process


@dataclass(frozen=True)
class Outcome:
    """One case after its run. `ranks`: per rank, a list of (name, global shape, start, values)."""

    case: dict
    ranks: list
    facts: list
    logits: np.ndarray

    def assembled(self):
        """Every tensor put together, and how often each of its elements was published."""
        tensors, times = {}, {}
        for name, shape, start, values in (part for rank in self.ranks for part in rank):
            whole = tensors.setdefault(name, np.full(shape, np.nan, dtype=np.float32))
            count = times.setdefault(name, np.zeros(shape, dtype=int))
            assert whole.shape == tuple(shape)
            box = tuple(slice(at, at + n) for at, n in zip(start, values.shape, strict=True))
            assert np.isnan(whole[box]).all() or (whole[box] == values).all(), f"{name}: two ranks publish different values"
            whole[box] = values
            count[box] += 1
        return tensors, times


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory):
    """Case name -> Outcome, of every case."""
    folder = tmp_path_factory.mktemp("megatron")
    (folder / "cases.json").write_text(json.dumps(CASES))
    child = Process("-W", "ignore", "-m", "tests.megatron.megatron_child", folder / "cases.json", folder / "out")
    try:
        output = child.output(240)
    finally:
        child.end()
    failed = "\n".join(file.read_text() for file in sorted((folder / "out").glob("*/error*.txt")))
    assert child.popen.returncode == 0, output
    assert not failed, failed
    return {name: read(folder / "out" / name, case) for name, case in CASES.items()}


def read(folder: Path, case):
    ranks, facts = [], []
    for rank in range(case["world"]):
        facts.append(json.loads((folder / f"rank{rank}.json").read_text()))
        arrays = np.load(folder / f"rank{rank}.npz")
        ranks.append([(*told, arrays[f"arr_{i}"]) for i, told in enumerate(facts[-1]["held"])])
    return Outcome(case, ranks, facts, np.load(folder / "logits.npy"))
