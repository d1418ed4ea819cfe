"""The checkpoint engine `mx` under verl's own registry and base class: what actors publish to a directory, rollout workers read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mx_common.directory import DirectoryServer
from tests.support.process import Process

CHILD = Path(__file__).parent / "verl_child.py"
# a folder of its own: verl's wheel brings a package called `tests`
VERL = Path(sys.prefix) / "verl"


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    own = {
        "MX_RUNTIME_DIR": str(folder / "run"),
        "MX_RECORDS_FILE": str(folder / "records.jsonl"),
        "MX_PUBLISH_WAIT_SECONDS": "2",
    }
    with DirectoryServer("127.0.0.1:0") as server:
        child = Process(CHILD, server.address, env={"PYTHONPATH": ":".join([*sys.path, str(VERL)]), **own})
        try:
            said = json.loads(child.expect("result", 120)) | {"directory": server.address}
        finally:
            child.end()
    records = [json.loads(line) for path in folder.glob("records*") for line in path.read_text().splitlines()]
    return {**said, "records": records}


def test_rollout_workers_read_every_tensor_that_actors_were_given_bit_for_bit_over_the_wire(result):
    assert result["same"] == [[True, True]] * 4
    read = sorted((r["version"], r["transport"].partition(":")[0], r["verified"], r["wire_bytes"]) for r in result["records"])
    assert read == [(version, "ucx", True, sum(result["shares"])) for version in (10, 10, 12, 12, 13, 13)]  # 11 was left early


def test_actors_share_the_tensors_evenly_and_each_keeps_its_own_in_place(result):
    assert sorted(result["kept"][0] + result["kept"][1]) == [f"w{i}" for i in range(5)]
    assert max(result["shares"]) - min(result["shares"]) <= 64 * 4 * 4
    assert result["addresses_stay"]


def test_the_version_is_the_global_step_and_the_next_one_where_verl_gives_none(result):
    assert [number for ((_, number, _, _),) in result["listed"]] == [10, 11, 12, 13]
    assert len({model for ((model, _, _, _),) in result["listed"]}) == 1


def test_all_actors_are_one_publisher_each_and_call_before_update_ahead_of_every_further_version(result):
    opened = [call for call in result["calls"] if call[0] == "open"]
    assert opened == [["open", f"rank{rank}", ["rank0", "rank1"], "in_place", result["directory"]] for rank in range(2)]
    for rank in range(2):
        mine = [call[0] for call in result["calls"] if call[1] == f"rank{rank}"]
        assert mine == ["open", "publish"] + ["before_update", "publish"] * 3


def test_no_lease_is_left_after_an_update_not_even_by_a_receiver_that_stops_early(result):
    assert [leases for ((_, _, _, leases),) in result["listed"]] == [0] * 4
    assert all(call[2] for call in result["calls"] if call[0] == "before_update")


def test_a_rollout_worker_cannot_send(result):
    assert "actor ranks" in result["refused"]


def test_closing_withdraws_what_actors_published(result):
    assert result["closes"] == [["close", "rank0"], ["close", "rank1"]]
    assert result["left"] == 0
