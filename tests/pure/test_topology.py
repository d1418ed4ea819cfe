"""Where nodes are and how close; nothing of it raises, whatever the operator wrote."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx_common import topology
from mx_common._candidates import depths
from mx_common.selection import Candidate
from mx_common.topology import levels, local_topology, seen_from, shared_depth

LEVELS = ("zone", "block", "rack", "host")


@pytest.mark.parametrize(
    ("a", "b", "depth"),
    [
        ({}, {}, -1),
        ({"zone": "a"}, {"zone": "a"}, 0),
        ({"zone": "a", "rack": "r1"}, {"zone": "a", "rack": "r1"}, 2),
        ({"zone": "a", "block": "b", "rack": "r1"}, {"zone": "a", "rack": "r1"}, 0),
        ({"zone": "a", "rack": "r1"}, {"zone": "b", "rack": "r1"}, -1),
        ({"host": "n1"}, {"host": "n1"}, 3),
        ({"zone": "a", "host": "n1"}, {"host": "n1"}, -1),
        ({"zone": "a", "colour": "red"}, {"zone": "a", "colour": "red"}, 0),
    ],
)
def test_the_walk_skips_what_neither_has_and_stops_where_they_part(a: dict[str, str], b: dict[str, str], depth: int) -> None:
    assert shared_depth(a, b, LEVELS) == depth
    assert shared_depth(b, a, LEVELS) == depth


places = st.dictionaries(st.sampled_from((*LEVELS, "other")), st.sampled_from(("1", "2")))


@given(st.lists(places), places)
def test_the_column_of_depths_is_the_depth_of_each(topologies: list[dict[str, str]], local: dict[str, str]) -> None:
    candidates = [Candidate("s", str(i), 0, topology=t) for i, t in enumerate(topologies)]
    assert depths(candidates, local, LEVELS).tolist() == [shared_depth(t, local, LEVELS) for t in topologies]


def test_the_default_levels_run_from_region_to_numa() -> None:
    assert levels() == ("region", "zone", "datacenter", "block", "rack", "host", "numa")


def test_an_unlisted_level_is_accepted_silently(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MX_P2P_TOPOLOGY_LEVELS", " planet ,, pod-2 ")
    assert levels() == ("planet", "pod-2")
    assert not caplog.records


def test_a_malformed_level_is_used_and_warned_about_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MX_P2P_TOPOLOGY_LEVELS", "zone,Rack!")
    assert levels() == levels() == ("zone", "Rack!")
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "Rack!" in caplog.text


def test_a_list_without_a_level_is_the_default_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MX_P2P_TOPOLOGY_LEVELS", ", ,")
    assert levels()[0] == "region"
    assert "names no level" in caplog.text


def test_the_variable_gives_the_topology_without_its_nulls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_P2P_TOPOLOGY", '{"zone": "a", "rack": 3, "host": null}')
    assert local_topology() == {"zone": "a", "rack": "3"}


@pytest.mark.parametrize(
    "raw",
    ["{", "[1]", '"zone"', "null", '{"zone": {"a": 1}}', '{"zone": "\\ud800"}', "[" * 100_000, '{"zone": 1' + "0" * 5000 + "}"],
)
def test_a_malformed_variable_is_an_empty_topology_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, raw: str
) -> None:
    monkeypatch.setenv("MX_P2P_TOPOLOGY", raw)
    assert local_topology() == local_topology() == {}
    assert len([r for r in caplog.records if r.name == topology.__name__]) == 1


def test_a_variable_that_is_not_utf8_is_an_empty_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_P2P_TOPOLOGY", os.fsdecode(b'{"zone": "\xff"}'))
    assert local_topology() == {}


def test_the_mounted_directory_gives_one_level_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in {"zone": "a\n", "rack": " r1 ", "block": "", ".hidden": "x"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "..data").mkdir()
    (tmp_path / "directory").mkdir()
    monkeypatch.setenv("DYN_TOPOLOGY_MOUNT_PATH", str(tmp_path))
    assert local_topology() == {"zone": "a", "rack": "r1"}


def test_the_variable_wins_over_the_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "zone").write_text("b")
    monkeypatch.setenv("DYN_TOPOLOGY_MOUNT_PATH", str(tmp_path))
    monkeypatch.setenv("MX_P2P_TOPOLOGY", '{"zone": "a"}')
    assert local_topology() == {"zone": "a"}


def test_a_directory_with_an_unreadable_file_is_an_empty_topology_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "zone").write_text("a")
    (tmp_path / "rack").write_bytes(b"\xff\xfe")
    monkeypatch.setenv("DYN_TOPOLOGY_MOUNT_PATH", str(tmp_path))
    assert local_topology() == local_topology() == {}
    assert len(caplog.records) == 1


def test_a_named_directory_that_is_missing_is_warned_about_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("DYN_TOPOLOGY_MOUNT_PATH", str(tmp_path / "missing"))
    assert local_topology() == local_topology() == {}
    assert [r.getMessage().count("does not exist") for r in caplog.records] == [1]


def test_a_policy_asked_about_another_node_is_told_that_nodes_place_and_afterwards_this_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MX_P2P_TOPOLOGY", '{"zone": "here"}')
    with seen_from({"rack": "r9"}, ("zone", "rack")):
        assert (local_topology(), levels()) == ({"rack": "r9"}, ("zone", "rack"))
    with pytest.raises(KeyError), seen_from({}, ()):
        raise KeyError
    assert local_topology() == {"zone": "here"}
    assert levels()[0] == "region"
