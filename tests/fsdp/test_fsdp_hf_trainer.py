"""Hugging Face's Trainer under accelerate's FSDP2: the callback publishes the weights after each step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.fsdp.fsdp_parts import assembled
from tests.support.process import Process

CHILD = Path(__file__).parent / "hf_trainer_child.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    child = Process(CHILD, folder, env={"PYTHONPATH": ":".join(sys.path)})
    try:
        child.expect("done", 120)
    finally:
        child.end()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def versions(rank):
    return {call[1]: call[2] for call in rank["calls"] if call[0] == "publish"}


def test_each_step_is_published_once_and_no_step_begins_before_readers_were_waited_for(ranks):
    wait = "before_update"
    for number, rank in enumerate(ranks):
        calls = [(call[0], call[1]) if call[0] == "publish" else call[0] for call in rank["calls"]]
        assert calls == ["open", ("publish", 1), wait, ("publish", 2), wait, ("publish", 3), "close"]
        assert rank["calls"][0] == ("open", "tiny/llama", f"rank{number}", ("rank0", "rank1"))


def test_the_last_version_is_the_trained_model_bit_for_bit(ranks):
    whole, full = assembled([versions(rank)[3] for rank in ranks]), ranks[0]["full"]
    assert set(whole) == set(full)
    for name, (value, count) in whole.items():
        assert (count == 1).all()
        assert torch.equal(value, full[name]), name


def test_versions_differ_and_lie_at_the_same_addresses(ranks):
    for rank in ranks:
        first, last = versions(rank)[1], versions(rank)[3]
        assert [part[4] for part in first] == [part[4] for part in last]
        assert any(not torch.equal(a[3], b[3]) for a, b in zip(first, last, strict=True))
