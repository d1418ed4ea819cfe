"""A simulation counts what the policy of a load does, the same for the same seed, and says what it cannot run."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_common import selection
from mx_common.errors import ConfigError
from mx_common.selection import Candidate, Target, known_policies, register_selector
from mx_common.simulate import BUSY_LOAD, Scenario, accept, grid, parse_snapshot, simulate
from mx_common.simulate.acceptance import SCENARIOS
from mx_common.simulate.figures import NOWHERE, Figures, Tally
from mx_common.simulate.plot import write_page
from mx_common.simulate.scenario import MAX_HOSTS, MAX_SOURCES, MAX_TARGETS, MAX_TRIALS
from mx_common.topology import levels, local_topology, shared_depth

LEVELS = ("zone", "rack", "host")
BUILT_IN = ("random", "rendezvous_hash", "load_aware", "topology_aware", "balanced")


@pytest.fixture(autouse=True)
def own_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_registered", {})


class First:
    def order(self, candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
        return list(candidates)


class Idlest:
    """As a policy that sees the readers would: no draw, no hash."""

    def order(self, candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
        return sorted(candidates, key=lambda c: c.source_load or 0.0)


class Nearby:
    """Knows its place as a third party's policy would."""

    def __init__(self) -> None:
        self.here, self.levels = local_topology(), levels()

    def order(self, candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
        return sorted(candidates, key=lambda c: [c.topology.get(level) != self.here.get(level) for level in self.levels])


scenarios = st.builds(
    Scenario,
    loads=st.lists(st.none() | st.floats(0, 1), min_size=2, max_size=12).map(tuple),
    targets=st.integers(1, 20),
    trials=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    noise=st.sampled_from([0.0, 0.2]),
    fresh=st.sampled_from([0.0, 0.5, 1.0]),
    hosts=st.sampled_from([(), grid(2, 2, 2), ({"rack": "r1"}, {})]),
    leaving=st.integers(0, 1),
    attempts=st.integers(1, 4),
)


@settings(deadline=None, max_examples=60)
@given(scenarios, st.sampled_from(BUILT_IN))
def test_picks_add_up_to_targets_and_every_share_lies_between_nothing_and_all(scenario: Scenario, policy: str) -> None:
    figures = simulate(scenario, policy)
    assert sum(figures.picks_mean) == pytest.approx(scenario.targets)
    assert list(figures.picks_mean) == sorted(figures.picks_mean, reverse=True)
    assert all(low <= high for low, high in zip(figures.picks_low, figures.picks_high, strict=True))
    assert 1 <= figures.peak_p50 <= figures.peak_p99 <= scenario.sources
    assert all(0 < time <= scenario.targets / scenario.share for time in (figures.time_mean, figures.time_p99))
    assert all(0 <= row.value <= 1 for row in figures.named() if row.share and row.value is not None)
    assert sum(figures.shared.values()) == pytest.approx(1 if any(scenario.hosts) else 0)
    assert (figures.busy_share is None) == (max(0.5 if v is None else v for v in scenario.loads) < BUSY_LOAD)
    assert (figures.moved_on_join is None) == (scenario.leaving == 0)


@settings(deadline=None, max_examples=30)
@given(scenarios, st.sampled_from(BUILT_IN))
def test_the_same_seed_gives_the_same_figures(scenario: Scenario, policy: str) -> None:
    assert simulate(scenario, policy) == simulate(scenario, policy)


@settings(deadline=None, max_examples=30)
@given(scenarios)
def test_where_a_source_is_chosen_by_hash_only_the_targets_of_the_one_that_left_move(scenario: Scenario) -> None:
    figures = simulate(replace(scenario, leaving=1), "rendezvous_hash")
    assert figures.moved_on_leave in (0.0, None)


def test_another_seed_draws_other_fleets() -> None:
    scenario = Scenario((0.0,) * 8, 32, trials=5)
    assert simulate(scenario, "balanced") != simulate(replace(scenario, seed=1), "balanced")


@pytest.mark.parametrize("sources", [1, 2, 8, 32])
def test_a_policy_that_always_takes_the_first_source_loads_it_as_many_times_as_there_are_sources(sources: int) -> None:
    register_selector("first", First)
    figures = simulate(Scenario((0.0,) * sources, 4 * sources, trials=3), "first")
    assert {figures.peak_mean, figures.peak_p50, figures.peak_p99, figures.time_mean, figures.time_p99} == {float(sources)}


def test_a_policy_that_takes_the_idlest_source_is_even_when_every_target_sees_who_reads_and_herds_when_none_does() -> None:
    register_selector("idlest", Idlest)
    scenario = Scenario((0.0,) * 8, 32, trials=3)
    stale, fresh = (simulate(replace(scenario, fresh=share), "idlest") for share in (0.0, 1.0))
    assert (stale.peak_p99, fresh.peak_p99) == (8.0, 1.0)


def test_a_fresh_snapshot_shows_the_larger_of_load_and_readers_over_max_readers() -> None:
    seen: list[list[float | None]] = []

    class Watching(First):
        def order(self, candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
            seen.append([c.source_load for c in candidates])
            return super().order(candidates, target)

    register_selector("watching", Watching)
    simulate(Scenario((0.3, None), 4, trials=1, fresh=1.0, max_readers=4), "watching")
    assert seen == [[0.3, None], [0.3, None], [0.5, None], [0.75, None]]


def test_noise_changes_what_is_published_and_not_which_sources_count_as_busy() -> None:
    seen: set[float | None] = set()

    class Watching(First):
        def order(self, candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
            seen.update(c.source_load for c in candidates)
            return super().order(candidates, target)

    register_selector("watching", Watching)
    figures = simulate(Scenario((0.9, 0.0, None), 4, trials=20, noise=0.3), "watching")
    assert figures.busy_share == 1.0
    published = {load for load in seen if load is not None}
    assert None in seen
    assert len(published) > 20
    assert all(0 <= load <= 1 for load in published)


def test_each_target_has_a_policy_of_its_own_made_where_it_is() -> None:
    register_selector("nearby", Nearby)
    scenario = Scenario((0.0,) * 8, 32, trials=5, hosts=grid(2, 2, 2))
    assert simulate(scenario, "nearby").shared == {"host": 1.0, "rack": 0.0, "zone": 0.0, NOWHERE: 0.0}
    # half of the hosts have no source, and each rack has one
    fewer = simulate(replace(scenario, loads=(0.0,) * 4, trials=50), "nearby").shared
    assert fewer["host"] + fewer["rack"] == 1.0
    assert 0.4 < fewer["host"] < 0.6


def test_balanced_tries_another_domain_and_nearest_first_need_not() -> None:
    scenario = Scenario((0.0,) * 32, 16, trials=5, hosts=grid(2, 2, 2))
    assert simulate(scenario, "balanced").outside_share == 1.0
    near = simulate(scenario, "topology_aware")
    assert (near.outside_share, near.shared["host"]) == (0.0, 1.0)


def test_without_another_domain_there_is_no_share_of_those_that_tried_one() -> None:
    assert simulate(Scenario((0.0,) * 4, 4, trials=2), "balanced").outside_share is None


places = st.dictionaries(st.sampled_from(LEVELS), st.sampled_from("ab"))


@settings(deadline=None, max_examples=100)
@given(st.lists(places, min_size=1, max_size=5), st.integers(1, 7), st.integers(1, 4))
def test_another_domain_is_there_and_tried_as_the_depths_of_all_pairs_say(
    hosts: list[dict[str, str]], sources: int, attempts: int
) -> None:
    register_selector("first", First)
    figures = simulate(Scenario((0.0,) * sources, 2, trials=1, hosts=tuple(hosts), attempts=attempts), "first")
    at = [hosts[i % len(hosts)] for i in range(sources)]
    outside = [shared_depth(at[0], other, LEVELS) < shared_depth(at[0], at[0], LEVELS) for other in at]
    assert figures.outside_share == (float(any(outside[:attempts])) if any(outside) else None)


def test_memory_grows_with_sources_and_hosts_not_with_their_pairs() -> None:
    register_selector("first", First)
    hosts = grid(20, 20, 10)
    tracemalloc.start()
    try:
        simulate(Scenario((0.0,) * len(hosts), 2, trials=1, hosts=hosts), "first")
        assert tracemalloc.get_traced_memory()[1] < 2**13 * len(hosts)  # a table of pairs: 2**15 for each host
    finally:
        tracemalloc.stop()


@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(sum), min_size=1, max_size=4))
def test_times_are_those_of_all_targets_listed_one_by_one(picks: list[list[int]]) -> None:
    scenario = Scenario((0.0,) * 4, 8)
    figures = Figures.of(scenario, [Tally(np.array(row)) for row in picks])
    times = [readers / scenario.share for row in picks for readers in row for _ in range(readers)]
    assert figures.time_mean == pytest.approx(np.mean(times))
    assert figures.time_p99 == pytest.approx(np.percentile(times, 99))


def test_the_place_of_this_machine_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario((0.0,) * 8, 16, trials=3, hosts=grid(2, 2, 2))
    here = simulate(scenario, "topology_aware")
    monkeypatch.setenv("MX_P2P_TOPOLOGY", '{"zone": "z1"}')
    monkeypatch.setenv("MX_P2P_TOPOLOGY_LEVELS", "host")
    assert simulate(scenario, "topology_aware") == here


def test_progress_is_told_once_a_trial() -> None:
    told: list[int] = []
    simulate(Scenario((0.0,), 1, trials=7), "balanced", lambda: told.append(1))
    assert len(told) == 7


def broken() -> First:
    raise OSError("no such file")


class Liar(First):
    def order(self, candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
        return list(candidates)[:1]


@pytest.mark.parametrize(
    ("factory", "says"),
    [(broken, "no such file"), (Liar, "not the 4 candidates"), (object, "no method order"), (None, "balanced")],
)
def test_a_policy_that_cannot_run_is_said_and_not_replaced_by_random(factory: Any, says: str) -> None:
    if factory is not None:
        register_selector("mine", factory)
    with pytest.raises(ConfigError, match=says):
        simulate(Scenario((0.0,) * 4, 4, trials=1), "mine")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"loads": ()}, "at least one load"),
        ({"loads": (1.5,)}, "from 0 to 1"),
        ({"loads": (float("nan"),)}, "from 0 to 1"),
        ({"targets": 0}, "targets=0"),
        ({"trials": 0}, "trials=0"),
        ({"attempts": 0}, "attempts=0"),
        ({"seed": -1}, "seed=-1"),
        ({"noise": -0.1}, "noise=-0.1"),
        ({"fresh": 2}, "fresh=2"),
        ({"leaving": 2}, "at least one has to stay"),
        ({"loads": (0.0,) * (MAX_SOURCES + 1)}, "100001 sources is too large: give at most 100000"),
        ({"hosts": ({},) * (MAX_HOSTS + 1)}, "100001 hosts is too large: give at most 100000"),
        ({"targets": MAX_TARGETS + 1}, "targets=400001: give at most 400000"),
        ({"trials": MAX_TRIALS + 1}, "trials=100001: give at most 100000"),
        ({"loads": (0.0,) * 40_000, "trials": 501}, "give at most 500 trials"),
    ],
)
def test_a_scenario_that_cannot_be_run_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Scenario(**{"loads": (0.0, 0.0), "targets": 4, **wrong})


def test_a_grid_spreads_the_first_sources_over_zones_then_racks() -> None:
    places = grid(2, 2, 3)
    assert len(set(places)) == 12
    assert [(p["zone"], p["rack"], p["host"]) for p in places[:5]] == [
        ("z0", "r0", "h0"),
        ("z1", "r0", "h0"),
        ("z0", "r1", "h0"),
        ("z1", "r1", "h0"),
        ("z0", "r0", "h1"),
    ]
    with pytest.raises(ConfigError, match="no host"):
        grid(2, 0, 1)
    with pytest.raises(ConfigError, match="999700029999 hosts: give one of at most 100000"):
        grid(9999, 9999, 9999)


def listed(**changed: Any) -> dict[str, Any]:
    row = {"model": "m", "mx_source_id": "s", "rank": 0, "status": "READY", "source_load": 0.25, "topology": {"rack": "r1"}}
    return {**row, **changed}


def test_a_snapshot_of_a_directory_is_the_ready_sources_of_the_lowest_rank() -> None:
    rows = [
        listed(),
        listed(source_load=None, topology={}),
        listed(status="STALE"),
        listed(ended=True),
        listed(rank=1),
    ]
    assert parse_snapshot(json.dumps({"sources": rows})) == ((0.25, None), ({"rack": "r1"}, {}))
    assert parse_snapshot("[0, 0.5, null]") == ((0.0, 0.5, None), ())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("3", "no list of sources"),
        ('{"sources": [1]}', "no list of sources"),
        ('{"sources": []}', "none of the 0 sources is READY"),
        (json.dumps({"sources": [listed(), listed(mx_source_id="t")]}), "2 identities"),
        ('["0.5"]', "'0.5'"),
        ("[true]", "True"),
    ],
)
def test_a_snapshot_that_cannot_be_used_says_what_can(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_snapshot(text)


def test_the_page_holds_every_policy_and_loads_nothing(tmp_path: Path) -> None:
    scenario = Scenario((0.0,) * 4, 8, trials=2, hosts=grid(2, 1, 1), leaving=1)
    results: dict[str, Figures] = {policy: simulate(scenario, policy) for policy in known_policies()}
    write_page(tmp_path / "page.html", "4 sources & <8> targets", results)
    page = (tmp_path / "page.html").read_text("utf-8")
    assert all(f'"name":"{policy}"' in page for policy in results)
    assert "4 sources &amp; &lt;8&gt; targets</p>" in page
    assert "narrowest shared:<br>host" in page.replace("\\u003c", "<").replace("\\u003e", ">")
    assert "<script src" not in page
    assert 'rel="stylesheet"' not in page
    assert '<meta name="viewport"' in page


def test_the_acceptance_list_tells_policies_apart() -> None:
    register_selector("first", First)
    told: list[int] = []
    rows = accept("first", trials=5, on_trial=lambda: told.append(1))
    failed = {row.promise.split(":")[0] for row in rows if not row.passed}
    assert len(told) == SCENARIOS * 5
    even = {"8 idle sources", "32 idle sources", "4 of 16 sources at load 0.9", "1 idle source, 31 at load 0.5"}
    assert even <= failed <= even | {"1 source joins 7"}
