"""What holds for every policy and every listing."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from mx_common.selection import Candidate, Target, explain, get_selector, identity_digest
from mx_common.source_load import read_load, read_loads

POLICIES = st.sampled_from(("random", "rendezvous_hash", "load_aware", "topology_aware", "balanced"))
PURE = st.sampled_from(("rendezvous_hash", "load_aware", "topology_aware", "balanced"))
# every code point, lone surrogates and the separator included
text = st.text(st.characters(exclude_categories=()) | st.just("|"), max_size=8)
loads = st.none() | st.floats() | st.integers() | st.just(10**400)
candidates = st.lists(
    st.builds(
        Candidate,
        mx_source_id=text,
        worker_id=text,
        worker_rank=st.integers(),
        topology=st.dictionaries(st.sampled_from(("region", "rack", "host", "else")), text, max_size=3),
        source_load=loads,
    ),
    max_size=12,
)
targets = st.builds(Target, text, text, st.integers())


@given(POLICIES, candidates, targets)
def test_an_order_is_a_permutation_whatever_the_candidates_hold(policy: str, listed: list[Candidate], target: Target) -> None:
    ordered = get_selector(policy).order(listed, target)
    assert sorted(map(id, ordered)) == sorted(map(id, listed))


@given(PURE, candidates, targets)
def test_the_same_listing_is_ordered_the_same_way_again(policy: str, listed: list[Candidate], target: Target) -> None:
    assert list(map(id, get_selector(policy).order(listed, target))) == list(
        map(id, get_selector(policy).order(listed, target))
    )


@given(PURE, candidates, targets)
def test_an_explanation_gives_the_places_of_the_order(policy: str, listed: list[Candidate], target: Target) -> None:
    kept = [c for c in listed if c.worker_id != target.worker_id and c.worker_rank == target.worker_rank]
    rows = explain(listed, target, selector=get_selector(policy))
    assert len(rows) == len(listed)
    assert [id(r.candidate) for r in rows if r.dropped is None] == list(map(id, get_selector(policy).order(kept, target)))
    assert [r.place for r in rows if r.dropped is None] == list(range(1, len(kept) + 1))


@given(st.lists(loads | st.text() | st.booleans()))
def test_a_load_is_read_the_same_alone_and_in_a_column_and_lies_between_0_and_1(values: list[object]) -> None:
    column = read_loads(values).tolist()
    assert column == [read_load(value) for value in values]
    assert all(0.0 <= load <= 1.0 for load in column)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_finite_load_is_clamped(value: float) -> None:
    assert read_load(value) == min(max(value, 0.0), 1.0)


@given(st.sampled_from((None, math.nan, math.inf, -math.inf, "0.1", b"", 10**400)))
def test_a_load_that_is_absent_or_makes_no_sense_is_a_half(value: object) -> None:
    assert read_load(value) == 0.5


@given(text, text, targets)
def test_a_digest_fits_64_bits(source: str, worker: str, target: Target) -> None:
    assert 0 <= identity_digest(Candidate(source, worker, 0), target) < 2**64
