"""Real Megatron training that publishes: from a loop, through Megatron-Bridge's callbacks, and around Megatron-LM's train_step."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest

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
    },
    "megatron-lm": {"via": "megatron-lm", "world": 2, "tp": 2, "overlap": False, "steps": 2, "replicas": False, "flag": True},
    "megatron-lm-unasked": {
        "via": "megatron-lm",
        "world": 2,
        "tp": 2,
        "overlap": False,
        "steps": 2,
        "replicas": False,
        "flag": False,
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    (folder / "runs.json").write_text(json.dumps(list(RUNS.values())))
    child = Process("-W", "ignore", "-m", "tests.megatron.trainer_child", folder / "runs.json", folder / "out")
    try:
        output = child.output(200)
    finally:
        child.end()
    failed = "\n".join(file.read_text() for file in sorted((folder / "out").glob("*/error*.txt")))
    assert child.popen.returncode == 0, output
    assert not failed, failed
    found = {}
    for number, (name, run) in enumerate(RUNS.items()):
        here = folder / "out" / str(number)
        found[name] = [
            Rank(json.loads((here / f"rank{r}.json").read_text()), dict(np.load(here / f"rank{r}.npz")))
            for r in range(run["world"])
        ]
    return found


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
