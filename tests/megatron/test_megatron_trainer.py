"""Real Megatron training that publishes: from a loop, through Megatron-Bridge's callbacks, and around Megatron-LM's train_step."""

from __future__ import annotations

import ast
import contextlib
import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mx_common.directory import DirectoryServer
from mx_common.directory.refit_client import RefitClient
from mx_common.refit import receive_full
from tests.megatron.cases import VOCABULARY, case
from tests.megatron.megatron_child import TOKENS
from tests.support.process import Process

STEPS = 3
RUNS = {
    "loop-overlapped": {"via": "loop", "world": 2, "tp": 1, "overlap": True, "steps": STEPS, "replicas": True},
    "loop": {"via": "loop", "world": 2, "tp": 1, "overlap": False, "steps": STEPS, "replicas": True},
    "loop-one-replica": {"via": "loop", "world": 2, "tp": 1, "overlap": True, "steps": STEPS, "replicas": False},
    "refused": {"via": "refused", "world": 2, "tp": 2, "overlap": False, "replicas": False},
    # steps 11 to 16, of which 14 and 15 are skipped; every second is published
    "bridge": {
        "via": "bridge",
        "world": 2,
        "tp": 2,
        "overlap": False,
        "steps": 7,
        "skipped": [3, 4, 5],
        "first_step": 10,
        "replicas": False,
        "model": "toy/bridge",
    },
    "megatron-lm": {
        "via": "megatron-lm",
        "world": 2,
        "tp": 2,
        "overlap": False,
        "steps": 2,
        "replicas": False,
        "flag": True,
        "model": "toy/megatron-lm",
    },
    "megatron-lm-unasked": {
        "via": "megatron-lm",
        "world": 2,
        "tp": 2,
        "overlap": False,
        "steps": 2,
        "replicas": False,
        "flag": False,
        "model": "toy/unasked",
    },
}


@dataclass(frozen=True)
class Rank:
    """What one rank left."""

    facts: dict
    arrays: dict

    def names(self, *kinds):
        return [event for event in self.facts["events"] if event[0] in kinds]

    @property
    def versions(self):
        return [event[1] for event in self.names("publish")]

    def of(self, version):
        return {key.partition("/")[2]: values for key, values in self.arrays.items() if key.startswith(f"{version}/")}


@dataclass(frozen=True)
class Training:
    """Each run's ranks, of those that published for real (version -> (tensors received, Megatron's logits)), what the directory still
    has of them at their end."""

    ranks: dict
    versions: dict
    left: list


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    own = {"MX_RUNTIME_DIR": str(folder / "run"), "MX_RECORDS_FILE": str(folder / "records.jsonl")}
    ranks, versions = {}, {}
    with DirectoryServer("127.0.0.1:0") as server, pytest.MonkeyPatch.context() as patch:
        for variable, value in own.items():
            patch.setenv(variable, value)
        (folder / "runs.json").write_text(json.dumps([{**run, "server": server.address} for run in RUNS.values()]))
        child = Process("-W", "ignore", "-m", "tests.megatron.trainer_child", folder / "runs.json", folder / "out", env=own)
        try:
            for number, (name, run) in enumerate(RUNS.items()):
                here, versions[name] = folder / "out" / str(number), {}
                while (said := child.expect("", 120)) not in ("done", "failed"):
                    if said.startswith("published "):
                        version = int(said.split()[1])
                        logits = np.load(here / f"logits{version}.npy")
                        versions[name][version] = received(run["model"], server.address, version), logits
                        (here / f"seen{version}").touch()
                assert said == "done", "\n".join(file.read_text() for file in sorted(here.glob("error*.txt")))
                ranks[name] = [
                    Rank(json.loads((here / f"rank{r}.json").read_text()), dict(np.load(here / f"rank{r}.npz")))
                    for r in range(run["world"])
                ]
        finally:
            child.end()
        with RefitClient(server.address) as client:
            return Training(ranks, versions, client.versions())


def received(model, server, version):
    with contextlib.closing(receive_full(model, server, version)) as tensors:
        return {name: tensor.clone() for name, tensor in tensors}


@pytest.fixture(scope="module")
def runs(training):
    return training.ranks


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(values, other[name]) for name, values in one.items())


def test_every_version_holds_the_weights_that_its_step_left(runs):
    for ranks in (runs["loop"], runs["loop-overlapped"]):
        for rank in ranks:
            assert rank.versions == list(range(STEPS + 1))
            assert all(rank.of(version) for version in rank.versions)
            assert not any(same(rank.of(version), rank.of(version + 1)) for version in range(STEPS))


def test_parameters_that_megatron_gathers_in_the_background_are_published_whole_and_equal_on_every_replica(runs):
    first, second = runs["loop-overlapped"]
    # until then replicas hold old values of what the other one updated
    assert max(rank.facts["stale"][step] for rank in (first, second) for step in range(STEPS)) > 0
    for version in first.versions:
        assert same(first.of(version), second.of(version))
        assert same(first.of(version), runs["loop"][0].of(version))


def test_publishing_does_not_change_what_is_trained(runs):
    assert runs["loop-overlapped"][0].facts["losses"] == runs["loop"][0].facts["losses"]
    published, plain = runs["megatron-lm"][0].facts["losses"], runs["megatron-lm-unasked"][0].facts["losses"]
    assert published == plain
    assert plain[0] != plain[1]


def test_addresses_stay_from_version_to_version(runs):
    for name in ("loop", "loop-overlapped", "bridge", "megatron-lm"):
        for rank in runs[name]:
            (addresses,) = {tuple(event[2]) for event in rank.names("publish")}
            assert addresses


def test_readers_are_waited_for_after_the_backward_pass_and_before_the_optimizer_steps(runs):
    for rank in runs["loop"]:
        order = [event[0] for event in rank.facts["events"]]
        for at, event in enumerate(order):
            if event == "stepped":
                assert order[at - 2 : at] == ["backward", "before_update"]


def test_all_ranks_name_the_same_run_and_the_same_slots(runs):
    for name in ("loop", "bridge", "megatron-lm"):
        opened = [rank.facts["events"][0] for rank in runs[name]]
        assert [event[2] for event in opened] == ["rank0", "rank1"]
        assert opened[0][3:] == opened[1][3:]
        assert opened[0][3] == ["rank0", "rank1"]
        assert opened[0][4]


def test_a_rank_that_holds_what_another_publishes_is_no_slot(runs):
    first, second = runs["loop-one-replica"]
    assert first.facts["events"][0][3] == ["rank0"]
    assert second.facts["events"] == []
    for version in first.versions:  # it took part in gathering nevertheless
        assert same(first.of(version), runs["loop"][0].of(version))


def test_the_callback_publishes_every_second_step_unless_nothing_has_changed(runs):
    for rank in runs["bridge"]:
        assert rank.versions == [10, 12, 14]
        assert rank.facts["events"][-1] == ["close"]
        assert rank.facts["undone"]


@pytest.mark.parametrize("name", ["bridge", "megatron-lm"])
def test_what_the_callback_and_the_flag_publish_arrives_through_a_directory_and_computes_megatrons_logits(training, name):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**case("llama", layers=2)["hf"]), dtype=torch.float32).eval()
    assert list(training.versions[name]) == training.ranks[name][0].versions
    before = None
    for version, (tensors, logits) in training.versions[name].items():
        for rank in training.ranks[name]:
            for key, values in rank.of(version).items():
                whole, _, start = key.partition("@")
                box = tuple(slice(at, at + n) for at, n in zip(ast.literal_eval(start), values.shape, strict=True))
                assert np.array_equal(tensors[whole].numpy()[box], values), key
        model.load_state_dict(tensors)
        with torch.no_grad():
            computed = model(torch.from_numpy(TOKENS)).logits.numpy()
        assert np.abs(computed - logits[..., :VOCABULARY]).max() <= 1e-5, version
        assert before is None or np.abs(computed - before).max() > 1e-2, version
        before = computed
    assert training.left == []  # withdrawn when training has ended


def test_the_flag_publishes_from_megatron_lms_training_step_and_nothing_is_published_without_it(runs):
    for rank in runs["megatron-lm"]:
        assert rank.versions == [0, 1, 2]
        assert rank.facts["events"][0][-1] == "snapshot"
    assert all(rank.facts["events"] == [] for rank in runs["megatron-lm-unasked"])


def test_a_rank_that_cannot_publish_stops_all_of_them_with_its_reason(runs):
    for rank in runs["refused"]:
        assert rank.facts["events"] == []
        assert rank.facts["error"].startswith(
            "ConfigError: 1 of 2 ranks cannot publish. rank 1: this model cannot be published as llama"
        )
        assert "num_layers is 2 in Megatron and 3" in rank.facts["error"]
