"""The checkpoint engine `mx` under verl's own registry and base class."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.process import Process

CHILD = Path(__file__).parent / "verl_child.py"
# a folder of its own: verl's wheel brings a package called `tests`
VERL = Path(sys.prefix) / "verl"


@pytest.fixture(scope="module")
def result():
    child = Process(CHILD, env={"PYTHONPATH": ":".join([*sys.path, str(VERL)])})
    try:
        return json.loads(child.expect("result", 120))
    finally:
        child.end()


def test_rollout_workers_receive_exactly_what_actors_were_given_update_after_update(result):
    assert result["same"] == [[True, True]] * 4


def test_actors_share_the_tensors_evenly_and_each_keeps_its_own_in_place(result):
    assert sorted(result["kept"][0] + result["kept"][1]) == [f"w{i}" for i in range(5)]
    assert max(result["shares"]) - min(result["shares"]) <= 64 * 4 * 4
    assert result["addresses_stay"]


def test_the_version_is_the_global_step_and_the_next_one_where_verl_gives_none(result):
    assert result["versions"] == [10, 11, 12, 13]
    assert result["models"] == 1


def test_all_actors_are_one_publisher_each_and_wait_for_readers_before_shares_are_overwritten(result):
    opened = [call for call in result["calls"] if call[0] == "open"]
    assert opened == [["open", f"rank{rank}", ["rank0", "rank1"], "in_place", "10.0.0.1:1"] for rank in range(2)]
    for rank in range(2):
        mine = [call[0] for call in result["calls"] if call[1] == f"rank{rank}"]
        assert mine == ["open", "publish"] + ["before_update", "publish"] * 3


def test_a_receiver_that_stops_early_lets_go(result):
    assert result["closed"].count(13) == 2


def test_a_rollout_worker_cannot_send(result):
    assert "actor ranks" in result["refused"]


def test_closing_withdraws_what_actors_published_and_nothing_else(result):
    assert result["closes"] == [["close", "rank0"], ["close", "rank1"]]
