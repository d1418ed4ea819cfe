"""Hugging Face's Trainer under accelerate's FSDP2: the callback publishes the weights after each step."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
import torch

from mx_common.directory import DirectoryServer
from mx_common.directory.refit_client import RefitClient
from mx_common.refit import receive_full
from tests.fsdp.fsdp_parts import assembled
from tests.support.process import Process

CHILD = Path(__file__).parent / "hf_trainer_child.py"
STEPS = 3


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """What each rank wrote down, and of every version what was received and what the trainer had."""
    folder = tmp_path_factory.mktemp("hf")
    versions = {}
    with DirectoryServer("127.0.0.1:0") as server, pytest.MonkeyPatch.context() as patch:
        own = {"MX_RUNTIME_DIR": str(folder / "run"), "MX_RECORDS_FILE": str(folder / "records.jsonl")}
        for name, value in own.items():
            patch.setenv(name, value)
        environment = {"PYTHONPATH": ":".join(sys.path), "MX_SERVER_ADDRESS": server.address, **own}
        child = Process(CHILD, folder, env=environment)
        try:
            for step in range(1, STEPS + 1):
                assert child.expect("published", 120) == str(step)
                with contextlib.closing(receive_full("tiny/llama", server.address, step)) as tensors:
                    received = {name: tensor.clone() for name, tensor in tensors}
                versions[step] = received, torch.load(folder / f"full-{step}.pt")
                (folder / f"seen-{step}").touch()
            child.expect("done")
        finally:
            child.end()
        with RefitClient(server.address) as client:
            left = client.versions()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)], versions, left


@pytest.fixture(scope="module")
def ranks(training):
    return training[0]


def versions(rank):
    return {call[1]: call[2] for call in rank["calls"] if call[0] == "publish"}


def test_each_step_is_received_through_a_directory_as_the_trainers_own_weights_bit_for_bit(training):
    _, versions, left = training
    for received, full in versions.values():
        assert received.keys() == full.keys()
        assert [name for name, tensor in received.items() if not torch.equal(tensor, full[name])] == []
    (first, _), (last, _) = versions[1], versions[STEPS]
    assert any(not torch.equal(tensor, last[name]) for name, tensor in first.items())
    assert left == []  # withdrawn when training has ended


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
