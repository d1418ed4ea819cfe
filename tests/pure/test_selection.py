"""Orders agree with the fleet's, every drop has its reason, and no policy can fail a load."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mx_common._policies import Balanced
from mx_common.errors import ConfigError
from mx_common.selection import (
    Candidate,
    Eligibility,
    Target,
    configured_policy_label,
    drop_reason,
    explain,
    funnel,
    get_configured_selector,
    get_selector,
    identity_digest,
    known_policies,
    policy_factory,
    register_selector,
)

POLICIES = ("random", "rendezvous_hash", "load_aware", "topology_aware", "balanced")
TARGET = Target("m", "target", 0)


def sources(*loads: float | None) -> list[Candidate]:
    return [Candidate("source", f"worker-{i}", 0, source_load=load) for i, load in enumerate(loads)]


def test_the_digest_of_every_golden_pair_is_the_fleets(golden_digests: dict[str, Any]) -> None:
    pair = Candidate(**golden_digests["candidate"]), Target(**golden_digests["target"])
    assert identity_digest(*pair) == int(golden_digests["digest"])


def test_the_order_of_every_golden_listing_is_the_fleets(
    golden_selection: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**golden_selection["env"], "MX_P2P_SOURCE_SELECTOR": golden_selection["policy"]}.items():
        monkeypatch.setenv(name, value)
    candidates = [Candidate(**c) for c in golden_selection["candidates"]]
    order = get_configured_selector().order(candidates, Target(**golden_selection["target"]))
    assert [c.worker_id for c in order] == golden_selection["order"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"worker_rank": 1}, "rank 1, wanted 0"),
        ({"accelerator": "rocm"}, "accelerator rocm, wanted cuda"),
        ({"accelerator": ""}, None),
        ({"worker_id": "target"}, "the target itself"),
        ({"worker_id": "gone"}, "a process of this host that has ended"),
        ({"updated_at": 59_999}, "last heartbeat 0.0 s older than allowed"),
        ({"updated_at": 10_000}, "last heartbeat 50.0 s older than allowed"),
        ({"updated_at": 0}, "last heartbeat 60.0 s older than allowed"),
    ],
)
def test_a_candidate_is_dropped_for_a_reason_in_words(change: dict[str, Any], reason: str | None) -> None:
    good = Candidate("source", "worker", 0, accelerator="cuda", updated_at=60_000)
    eligibility = Eligibility("cuda", 60_000, frozenset({"gone"}))
    found = drop_reason(dataclasses.replace(good, **change), TARGET, eligibility)
    assert (found and str(found)) == reason


def test_without_bounds_only_the_rank_and_the_target_itself_matter() -> None:
    listed = [*sources(0.1, 0.2), Candidate("source", "target", 0), Candidate("source", "other", 3)]
    kept, dropped = funnel(listed, TARGET)
    assert kept == listed[:2]
    assert [(c.worker_id, str(reason)) for c, reason in dropped] == [
        ("target", "the target itself"),
        ("other", "rank 3, wanted 0"),
    ]


def test_a_target_of_unknown_accelerator_takes_any_source() -> None:
    assert drop_reason(Candidate("s", "w", 0, accelerator="cuda"), TARGET, Eligibility()) is None


def test_random_leaves_the_process_global_generator_alone() -> None:
    random.seed(1)
    before = random.getstate()
    orders = {tuple(c.worker_id for c in get_selector("random").order(sources(*[None] * 20), TARGET)) for _ in range(5)}
    assert random.getstate() == before
    assert len(orders) > 1


def test_ties_keep_the_order_of_the_input() -> None:
    twins = [Candidate("s", "twin", 0, model_name=str(i)) for i in range(50)]
    for policy in POLICIES[1:]:
        assert get_selector(policy).order(twins, TARGET) == twins


def test_an_unknown_load_counts_as_a_half() -> None:
    assert [e.load for e in explain(sources(None), TARGET)] == [0.5]
    for policy in POLICIES[2:]:
        told = sources(0.5, 0.5, 0.5, 0.1)
        untold = sources(None, math.nan, math.inf, 0.1)
        ordered = [[c.worker_id for c in get_selector(policy).order(c, TARGET)] for c in (told, untold)]
        assert ordered[0] == ordered[1]


def test_a_selector_keeps_the_configuration_it_was_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_P2P_LOAD_WEIGHT", "0")
    by_hash = get_selector("load_aware")
    monkeypatch.setenv("MX_P2P_LOAD_WEIGHT", "1000")
    listed = sources(*[i / 10 for i in range(10)])
    assert by_hash.order(listed, TARGET) == get_selector("rendezvous_hash").order(listed, TARGET)
    assert get_selector("load_aware").order(listed, TARGET) == listed


@pytest.mark.parametrize(("weight", "like"), [("-3", 0.0), ("nan", 1.0), ("inf", 1.0), ("much", 1.0)])
def test_a_bad_load_weight_is_zero_when_negative_and_the_default_otherwise(
    monkeypatch: pytest.MonkeyPatch, weight: str, like: float
) -> None:
    monkeypatch.setenv("MX_P2P_LOAD_WEIGHT", weight)
    for row in explain(sources(0.4, 0.8), TARGET, selector=get_selector("load_aware")):
        assert row.score == row.unit_hash - like * row.load


@pytest.mark.parametrize(
    ("settings", "weight"),
    [
        ({}, 0.0),
        ({"MX_P2P_LOAD_WEIGHT": "2"}, 2.0),
        ({"MX_P2P_LOAD_WEIGHT": "2", "MX_P2P_TOPOLOGY_LOAD_WEIGHT": "3"}, 3.0),
        ({"MX_P2P_TOPOLOGY_LOAD_WEIGHT": "0"}, 0.0),
    ],
)
def test_the_weight_under_topology_is_its_own_else_the_common_one_the_operator_set(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], weight: float
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for row in explain(sources(0.4, 0.8), TARGET, selector=get_selector("topology_aware")):
        assert row.score == row.unit_hash - weight * row.load


class Reverse:
    """A third-party policy."""

    def order(self, candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
        return list(reversed(candidates))


class Broken:
    def order(self, candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
        raise RuntimeError("no idea")


class Greedy:
    def order(self, candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
        return [candidates[0]] * len(candidates)


def test_a_registered_policy_is_used_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    register_selector("Reverse", Reverse)
    monkeypatch.setenv("MX_P2P_SOURCE_SELECTOR", " reverse ")
    listed = sources(0.1, 0.2, 0.3)
    assert get_configured_selector().order(listed, TARGET) == listed[::-1]
    assert configured_policy_label() == "reverse"
    assert "reverse" in known_policies()
    assert [(e.place, e.candidate, e.score) for e in explain(listed, TARGET)] == [
        (i, candidate, None) for i, candidate in enumerate(listed[::-1], start=1)
    ]


@pytest.mark.parametrize("policy", [Broken, Greedy])
def test_a_policy_that_misbehaves_is_warned_about_once_and_every_candidate_is_still_ordered(
    policy: type[Broken] | type[Greedy], caplog: pytest.LogCaptureFixture
) -> None:
    register_selector(policy.__name__, policy)
    selector = get_selector(policy.__name__)
    for _ in range(2):
        listed = sources(*[0.1] * 9)
        assert sorted(c.worker_id for c in selector.order(listed, TARGET)) == [c.worker_id for c in listed]
    assert caplog.text.count("using random") == 1


def no_policy() -> Reverse:
    raise OSError("no such file")


@pytest.mark.parametrize(("name", "factory"), [("raises", no_policy), ("useless", object), ("missing", None)])
def test_a_policy_that_cannot_be_made_is_random_with_one_warning_that_lists_the_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, factory: Any
) -> None:
    if factory is not None:
        register_selector(name, factory)
    monkeypatch.setenv("MX_P2P_SOURCE_SELECTOR", name)
    assert configured_policy_label() == configured_policy_label() == "random"
    assert len(caplog.records) == 1
    assert all(known in caplog.text for known in POLICIES)


@pytest.mark.parametrize("name", ["random", "Balanced", "", " "])
def test_a_name_of_this_pack_cannot_be_registered(name: str) -> None:
    with pytest.raises(ConfigError, match="choose a name other than"):
        register_selector(name, Reverse)


def test_a_factory_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match="give a callable"):
        register_selector("later", "module:factory")  # type: ignore[arg-type]


def test_a_factory_of_policies_lets_what_a_load_would_survive_be_seen() -> None:
    register_selector("raises", no_policy)
    register_selector("useless", object)
    with pytest.raises(OSError, match="no such file"):
        policy_factory("raises")()
    with pytest.raises(TypeError, match="no method order"):
        policy_factory("useless")()
    with pytest.raises(ConfigError, match=r"missing.*known: random, .*balanced"):
        policy_factory("missing")
    assert isinstance(policy_factory(" Balanced ")(), Balanced)


def test_a_policy_is_found_through_the_entry_point_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "third_party.py").write_text("class Same:\n    def order(self, candidates, target): return list(candidates)\n")
    info = tmp_path / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[mx_common.selectors]\nsame = third_party:Same\nabsent = third_party:Absent\nrandom = third_party:Same\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    listed = sources(0.3, 0.1, 0.2)
    assert get_selector("same").order(listed, TARGET) == listed
    assert get_selector("same").name == "same"
    assert get_selector("absent").name == "random"
    assert {tuple(c.worker_id for c in get_selector("random").order(listed, TARGET)) for _ in range(64)} != {
        tuple(c.worker_id for c in listed)
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker_id", None),
        ("worker_rank", "0"),
        ("worker_rank", True),
        ("topology", "rack=1"),
        ("source_load", "busy"),
        ("updated_at", 1.5),
    ],
)
def test_a_candidate_of_the_wrong_type_is_refused_by_its_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"Candidate.{field}"):
        Candidate(**{"mx_source_id": "s", "worker_id": "w", "worker_rank": 0, field: value})  # type: ignore[arg-type]


def test_a_candidate_cannot_be_changed_and_can_be_hashed_and_copied() -> None:
    topology = {"rack": "r1", "host": None}
    candidate = Candidate("s", "w", 0, topology=topology)  # type: ignore[arg-type]
    topology["rack"] = "r2"
    assert candidate.topology == {"rack": "r1"}
    with pytest.raises(TypeError, match="frozen"):
        candidate.topology["rack"] = "r3"  # type: ignore[index]
    assert len({candidate, copy.deepcopy(candidate), pickle.loads(pickle.dumps(candidate))}) == 1


def test_one_text_is_not_a_set_of_workers() -> None:
    with pytest.raises(ConfigError, match="gone_workers"):
        Eligibility(gone_workers="worker")  # type: ignore[arg-type]


def test_an_explanation_has_every_candidate_with_its_parts_and_its_fate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_P2P_TOPOLOGY", '{"zone": "a", "host": "n1"}')
    near = Candidate("s", "near", 0, topology={"zone": "a", "host": "n1"}, source_load=0.3)
    far = Candidate("s", "far", 0, topology={"zone": "b"})
    other = Candidate("s", "other", 1)
    rows = explain([other, far, near], TARGET, selector=get_selector("balanced"))
    assert [(r.candidate.worker_id, r.place, r.dropped) for r in rows] == [
        ("near", 1, None),
        ("far", 2, None),
        ("other", None, "rank 1, wanted 0"),
    ]
    assert [(r.depth, r.tier, r.load) for r in rows] == [(5, 0, 0.3), (-1, 1, 0.5), (None, None, 0.5)]
    for row in rows:
        assert row.digest == identity_digest(row.candidate, TARGET)
        assert row.unit_hash == row.digest / 2**64
    assert rows[0].score == pytest.approx(-(0.7**2) / math.log(rows[0].unit_hash))


def test_a_separator_inside_a_field_is_hashed_as_it_is_and_reported_once() -> None:
    code = (
        "from mx_common.selection import *\n"
        "pairs = [(Candidate('a|b', 'c', 0), Target('m', 't', 0)), (Candidate('a', 'b|c', 0), Target('m', 't', 0))]\n"
        "print(len({identity_digest(*pair) for pair in pairs * 3}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1\n"
    assert done.stderr.count("Candidate.mx_source_id") == done.stderr.count("Candidate.worker_id") == 1
