"""`balanced` spreads targets that share one stale snapshot, and keeps them where they are when the fleet changes.

Each simulation is 300 fleets with a fixed seed; its figures are taken over all of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np

from mx_common._policies import Balanced
from mx_common.selection import Candidate, Target

TRIALS = 300
LEVELS = ("zone", "rack", "host")
FLAT = Balanced(local={}, level_names=LEVELS)


def fleet(rng: random.Random, loads: Sequence[float]) -> list[Candidate]:
    return [Candidate("3f0cd0e873a0000c", f"{rng.getrandbits(128):032x}", 0, source_load=load) for load in loads]


def picks(rng: random.Random, sources: Sequence[Candidate], count: int) -> list[Candidate]:
    """The first choice of `count` targets that all see the same listing."""
    return [FLAT.order(sources, Target("m", f"{rng.getrandbits(128):032x}", 0))[0] for _ in range(count)]


def peaks(seed: int, loads: Sequence[float]) -> list[float]:
    """For each trial, the picks of the most picked source over the mean."""
    rng = random.Random(seed)
    found = []
    for _ in range(TRIALS):
        sources = fleet(rng, loads)
        counts = Counter(c.worker_id for c in picks(rng, sources, 4 * len(sources)))
        found.append(max(counts.values()) / 4)
    return found


def test_an_idle_fleet_of_8_is_evenly_used() -> None:
    assert np.percentile(peaks(1, [0.0] * 8), 99) <= 3.0


def test_an_idle_fleet_of_32_is_evenly_used() -> None:
    assert np.percentile(peaks(2, [0.0] * 32), 99) <= 3.5


def test_the_one_idle_source_of_32_is_not_herded_on() -> None:
    assert np.mean(peaks(3, [0.0] + [0.5] * 31)) <= 4.0


def test_a_quarter_of_busy_sources_gets_a_hundredth_of_the_picks() -> None:
    rng = random.Random(4)
    shares = []
    for _ in range(TRIALS):
        sources = fleet(rng, [0.9] * 4 + [0.0] * 12)
        busy = {c.worker_id for c in sources[:4]}
        shares.append(np.mean([c.worker_id in busy for c in picks(rng, sources, 4 * len(sources))]))
    assert np.mean(shares) <= 0.01


def test_a_source_that_leaves_moves_only_its_own_targets_and_one_that_joins_moves_its_share() -> None:
    rng = random.Random(5)
    moved = []
    for _ in range(TRIALS):
        sources = fleet(rng, [0.0] * 8)
        targets = [Target("m", f"{rng.getrandbits(128):032x}", 0) for _ in range(32)]
        before = [FLAT.order(sources[:-1], t)[0] for t in targets]
        after = [FLAT.order(sources, t)[0] for t in targets]
        # read forwards the last source joins, read backwards it leaves
        assert all(old is new for old, new in zip(before, after, strict=True) if new is not sources[-1])
        moved.append(np.mean([new is sources[-1] for new in after]))
    # 9600 picks: three standard deviations of their mean are 0.011
    assert abs(np.mean(moved) - 1 / 8) < 0.011


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
