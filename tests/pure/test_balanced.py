"""`balanced` spreads targets that share one stale snapshot, keeps them where they are when the fleet changes, and prefers what is near
without building walls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mx_common._policies import Balanced
from mx_common.selection import Candidate, Target
from mx_common.simulate import Scenario, accept, simulate

LEVELS = ("zone", "rack", "host")


def test_balanced_is_accepted() -> None:
    rows = accept("balanced", seed=1)
    assert [(row.promise, row.limit) for row in rows[:5]] == [
        ("8 idle sources: p99 of max/mean picks", 3.0),
        ("32 idle sources: p99 of max/mean picks", 3.5),
        ("4 of 16 sources at load 0.9: share of picks on them", 0.01),
        ("1 idle source, 31 at load 0.5: mean of max/mean picks", 4.0),
        ("1 of 8 sources leaves: share of other targets that move", 0.0),
    ]
    assert [row for row in rows if not row.passed] == []


def test_a_source_that_joins_gets_its_share_and_no_less() -> None:
    moved = simulate(Scenario((0.0,) * 8, 32, seed=2, leaving=1), "balanced").moved_on_join
    # 9600 picks: three standard deviations of their mean are 0.011
    assert moved is not None
    assert abs(moved - 1 / 8) < 0.011


def at(zone: str, rack: str, host: str, load: float | None, name: str = "") -> Candidate:
    return Candidate(
        "s", f"{zone}/{rack}/{host}/{name}", 0, topology={"zone": zone, "rack": rack, "host": host}, source_load=load
    )


HERE = Balanced(local={"zone": "a", "rack": "r1", "host": "h1"}, level_names=LEVELS)


def first_choices(policy: Balanced, sources: Sequence[Candidate]) -> Counter[str]:
    return Counter(policy.order(sources, Target("m", str(i), 0))[0].worker_id for i in range(400))


def test_a_near_source_with_room_is_always_first() -> None:
    near, far = at("a", "r1", "h2", 0.7), [at("b", "r1", f"h{i}", 0.0) for i in range(20)]
    assert first_choices(HERE, [*far, near]) == {near.worker_id: 400}


def test_a_near_tier_at_a_mean_load_of_exactly_four_fifths_does_not_spill() -> None:
    near = [at("a", "r1", f"h{i}", 0.8) for i in range(2, 5)]
    far = [at("b", "r9", f"h{i}", 0.0) for i in range(20)]
    assert set(first_choices(HERE, [*far, *near])) == {c.worker_id for c in near}


def test_a_near_tier_that_is_nearly_full_spills_to_the_next_one_and_no_further() -> None:
    near = [at("a", "r1", f"h{i}", 0.85) for i in range(2, 5)]
    next_one = [at("a", "r2", f"h{i}", 0.0) for i in range(5, 8)]
    far = [at("b", "r9", f"h{i}", 0.0) for i in range(20)]
    chosen = first_choices(HERE, [*far, *near, *next_one])
    assert set(chosen) <= {c.worker_id for c in near + next_one}
    assert sum(chosen[c.worker_id] for c in next_one) > 300


def test_a_fleet_at_full_load_is_still_ordered_nearest_group_mixed_in() -> None:
    full = [at("a", "r1", "h2", 1.0), at("a", "r2", "h3", 1.0), at("b", "r1", "h4", 1.0)]
    assert set(first_choices(HERE, full)) == {c.worker_id for c in full}


def test_of_the_first_three_one_lies_outside_the_narrowest_domain_of_the_first() -> None:
    local = [at("a", "r1", "h1", 0.0, str(i)) for i in range(6)]
    other_host = at("a", "r1", "h2", 0.0)
    other_zone = at("b", "r1", "h1", 0.0)
    for i in range(100):
        order = HERE.order([other_zone, *local, other_host], Target("m", str(i), 0))
        assert order[2] is other_host  # the best of those outside, and only as far forward as it must come
        assert {c.worker_id for c in (*order[:2], *order[3:7])} == {c.worker_id for c in local}


def test_without_a_source_outside_the_order_is_left_as_it_is() -> None:
    local = [at("a", "r1", "h1", 0.0, str(i)) for i in range(6)]
    flat = [Candidate("s", c.worker_id, 0, source_load=0.0) for c in local]
    for i in range(20):
        target = Target("m", str(i), 0)
        assert [c.worker_id for c in HERE.order(local, target)] == [c.worker_id for c in HERE.order(flat, target)]
