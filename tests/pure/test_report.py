"""What a report says: its figures are those of the records, it is never larger than it may be, and it says what it leaves out."""

from __future__ import annotations

import io
import json
import statistics
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx_common.floor import INSTALLED_MARKER, INSTALLED_SCHEMA, SLOW_MARKER, SLOW_SCHEMA
from mx_common.gate import Limits, Wanted, judge, read
from mx_common.gate.breakdown import LOADS_KEPT
from mx_common.report import page_of, tabulate
from mx_common.report.rates import MARKS, POINTS, RANKS_DRAWN, WORST
from mx_common.report.tables import FINDINGS, LINKS, RANKS, RUNS, SOURCES, STAGE_BARS, TRANSFERS
from tests.pure.test_gate import BYTES, CEILING, FLOOR, SLOW, line, record, run


def evidence_of(records):
    return read(["-"], io.BytesIO("".join(f"{one if isinstance(one, str) else line(one)}\n" for one in records).encode()))


def report_of(records, wanted=None, limits=None):
    evidence = evidence_of(records)
    return tabulate(evidence, judge(evidence, wanted or Wanted(), limits or Limits()))


def peer(source, gbps, wire_bytes=BYTES):
    return {"source": source, "wire_bytes": wire_bytes, "wire_s": round(wire_bytes * 8 / gbps / 1e9, 9)}


def installed(rank=0, step=1, **stages):
    """A line that says how long the stages of a version took, installing too."""
    document = {"schema": INSTALLED_SCHEMA, "path": "reshard", "model": "m", "rank": rank, "step": step, "host": "h"}
    return f"{INSTALLED_MARKER} {json.dumps({**document, 'stages_s': stages})}"


@pytest.mark.parametrize(
    ("records", "wanted", "limits", "verdict", "headline", "said"),
    [
        pytest.param(run(), Wanted(), Limits(), "pass", "24 transfers: 24 ok.",
                     ["Transfers were held against a floor, no rank lags behind its like, and the run does not slow down."],
                     id="pass"),
        pytest.param(run(of={(1, 2): SLOW}), Wanted(), Limits(max_slow_share=0.1), "pass", "24 transfers: 23 ok, 1 slow.",
                     ["Transfers were held against a floor, no rank lags behind its like, and the run does not slow down. "
                      "Slow transfers are within the share that was allowed."], id="pass with slow ones"),
        pytest.param(run(of={(1, 2): SLOW}), Wanted(), Limits(warmup=1), "regression",
                     "24 transfers: 23 ok, 1 slow; 4 of them are warm-up.",
                     ["Below the floor: 1. Reshard rank 1 step 2: 50.0 Gbit/s is below the floor of 100 Gbit/s (stdin:6)."],
                     id="one slow"),
        pytest.param(run(of={(1, 2): SLOW, (3, 2): {**SLOW, "gbps": 20.0}}), Wanted(), Limits(), "regression",
                     "24 transfers: 22 ok, 2 slow.",
                     ["Below the floor: 2. Worst: reshard rank 3 step 2: 20.0 Gbit/s is below the floor of 100 Gbit/s (stdin:8)."],
                     id="the worst of two"),
        pytest.param([], Wanted(), Limits(), "no evidence", "0 transfers: none.",
                     ["Nothing was judged. No record of a transfer was found."], id="nothing"),
        pytest.param(run(), Wanted(ranks=frozenset(range(5)), steps=frozenset({1})), Limits(), "no evidence", "24 transfers: 24 ok.",
                     ["Expected and not there: 6. Worst: reshard step 1: no transfer of rank 4."], id="a rank is missing"),
        pytest.param([*run(steps=1), record(path="load", step=0)], Wanted(), Limits(), "pass",
                     "5 transfers on 2 paths and models: 5 ok.",
                     ["Transfers were held against a floor, no rank lags behind its like, and the run does not slow down."],
                     id="two paths"),
    ],
)  # fmt: skip
def test_the_verdict_is_said_in_words(records, wanted, limits, verdict, headline, said):
    report = report_of(records, wanted, limits)
    assert (report.verdict, report.headline, list(report.sentences)) == (verdict, headline, said)


def test_every_rank_has_its_line_against_floor_and_ceiling_and_what_is_out_of_bounds_is_marked():
    (found,) = report_of(run(ranks=3, steps=4, of={(1, 2): SLOW, (2, 3): {"verdict": "impossible", "gbps": 900.0}})).runs
    rates = found.rates
    assert (rates.steps, rates.together, rates.band, rates.notes) == ((1, 2, 3, 4), 1, None, ())
    lines = {one.name: one.values for one in rates.lines}
    assert lines == {
        "rank 0": (200.0, 200.0, 200.0, 200.0),
        "rank 1": (200.0, 50.0, 200.0, 200.0),
        "rank 2": (200.0, 200.0, 900.0, 200.0),
    }
    assert (set(rates.floor), set(rates.ceiling)) == ({FLOOR}, {CEILING})
    assert [(one.step, one.gbps, one.verdict, one.name, one.where) for one in rates.marks] == [
        (2, 50.0, "slow", "rank 1", "stdin:5"),
        (3, 900.0, "impossible", "rank 2", "stdin:9"),
    ]


def test_without_floor_or_ceiling_there_is_none_to_draw_and_floors_that_differ_are_said():
    (bare,) = report_of(
        run(of={(r, s): {"floor": 0.0, "armed": False, "ceiling": 0.0} for r in range(4) for s in range(1, 7)})
    ).runs
    assert (set(bare.rates.floor), set(bare.rates.ceiling), bare.floor) == ({None}, {None}, "none")
    (mixed,) = report_of(run(of={(0, 2): {"floor": 120.0, "ceiling": 700.0}})).runs
    assert mixed.rates.floor[:3] == (100.0, 120.0, 100.0)
    assert mixed.rates.ceiling[:3] == (CEILING, 700.0, CEILING)
    assert mixed.floor == "100 to 120"
    assert mixed.rates.notes == ("Floors differ; the line is the highest in force at each point.",)


def test_many_ranks_become_the_worst_as_lines_and_all_as_a_band():
    rates_of = {rank: 101.0 + rank for rank in range(40)}
    many = [record(rank, step, rates_of[rank]) for step in (1, 2) for rank in range(40)]
    (found,) = report_of(many).runs
    assert [one.name for one in found.rates.lines] == [f"rank {n}" for n in range(WORST)]
    band = found.rates.band
    assert (band.lowest[0], band.middle[0]) == (101.0, statistics.median(rates_of.values()))
    assert band.lowest[0] < band.low[0] < band.middle[0] < band.high[0] < 140.0
    assert found.rates.notes == (f"40 ranks; the worst {WORST} are lines, the band is of all.",)
    assert len(found.ranks) == 40


def test_steps_that_share_a_point_are_said_and_the_lowest_rate_counts():
    steps = 2 * POINTS
    (found,) = report_of([record(0, step, 110.0 if step == 8 else 200.0) for step in range(1, steps + 1)]).runs
    assert (len(found.rates.steps), found.rates.together, found.rates.steps[:3]) == (POINTS, 2, (1, 3, 5))
    assert [number for number, value in enumerate(found.rates.lines[0].values) if value == 110.0] == [3]
    assert found.rates.notes[0] == f"{steps:,} steps; 2 of them share a point, at which a rank's lowest rate counts."


def test_the_worst_rank_comes_first_and_says_where_its_lowest_is():
    of = {(2, 3): SLOW, **{(3, step): {"gbps": 150.0} for step in range(1, 7)}}
    (found,) = report_of(run(of=of)).runs
    assert [(one.rank, one.out_of_bounds, one.lowest, one.median) for one in found.ranks] == [
        (2, 1, 50.0, 200.0),
        (3, 0, 150.0, 150.0),
        (0, 0, 200.0, 200.0),
        (1, 0, 200.0, 200.0),
    ]
    assert (found.ranks[0].lowest_step, found.ranks[0].where) == (3, "stdin:11")


def test_ranks_of_one_number_are_told_apart_by_their_hosts():
    (found,) = report_of([record(0, step, host=host) for step in (1, 2) for host in ("a", "b")]).runs
    assert {one.name for one in found.ranks} == {"rank 0 on a", "rank 0 on b"} == {one.name for one in found.rates.lines}


def test_a_run_without_steps_shows_its_transfers_slowest_first():
    loads = [record(0, 0, gbps, path="load", host=f"n{n}") for n, gbps in enumerate((300.0, 120.0, 200.0))]
    (found,) = report_of([*loads, record(0, 0, 30.0, path="load", host="n9", verdict="slow")]).runs
    assert found.rates is None
    assert [(one.name, one.gbps, one.verdict) for one in found.transfers] == [
        ("rank 0 on n9", 30.0, "slow"),
        ("rank 0 on n1", 120.0, "ok"),
        ("rank 0 on n2", 200.0, "ok"),
        ("rank 0 on n0", 300.0, "ok"),
    ]


def test_unmeasured_transfers_are_counted_by_reason_and_drawn_only_when_their_rate_says_something():
    small = {"verdict": "unmeasured", "reason": "below_min_bytes", "gbps": 3.0}
    bare = {"verdict": "unmeasured", "reason": "no_link_rate", "floor": None, "armed": False}
    (found,) = report_of(run(ranks=1, of={(0, 2): small, (0, 3): bare})).runs
    assert found.unmeasured == (("below_min_bytes", 1), ("no_link_rate", 1))
    assert found.rates.steps == (1, 3, 4, 5, 6)
    assert found.ranks[0].lowest == 200.0


def test_a_refit_shows_the_stages_of_the_rank_that_took_longest_with_what_came_after_its_record():
    early = [record(rank, step, stages_s={"wire": 1.0 + rank, "wait": 0.5}) for step in (1, 2) for rank in (0, 1)]
    (found,) = report_of(
        [*early, installed(1, 1, wait=0.5, wire=2.0, install=0.25), installed(0, 2, wire=1.0, install=0.1)]
    ).runs
    stages = found.stages
    assert (stages.names, stages.bars, stages.ranks) == (("wait", "wire", "install"), ("1", "2"), ("rank 1", "rank 1"))
    assert stages.seconds == ((0.5, 2.0, 0.25), (0.5, 2.0, 0.0))
    assert stages.notes == ("Each bar is the rank that took longest.",)


def test_a_version_that_serves_is_no_transfer():
    evidence = evidence_of([record(), installed(0, 1, install=1.0)])
    assert (len(evidence.transfers), evidence.troubles) == (1, [])


def test_two_versions_on_one_line_are_both_read_and_one_that_was_cut_is_named():
    evidence = evidence_of([record(), installed(0, 1, install=1.0) + installed(0, 2, install=2.0), installed(0, 3)[:25]])
    assert sorted(step for _, _, step in evidence.breakdown.refits) == [1, 2]
    assert [(trouble.what, trouble.line) for trouble in evidence.troubles] == [("truncated record", 3)]


@pytest.mark.parametrize("figure", [-1.0, float("nan"), float("inf"), True, "1", None, [1.0]])
def test_a_figure_that_is_none_counts_nothing(figure):
    odd = {"source": "a", "wire_bytes": figure, "wire_s": 1.0}
    (found,) = report_of(
        [record(0, 1, peers=[odd, {**odd, "wire_bytes": BYTES, "wire_s": figure}], stages_s={"wire": figure})]
    ).runs
    assert (found.links, found.stages) == ((), None)
    assert [(one.source, one.wire_bytes) for one in found.sources] == [("a", BYTES)]


def test_of_many_refits_in_a_row_the_slowest_is_shown():
    many = [record(0, step, stages_s={"wire": 9.0 if step == 4 else 1.0}) for step in range(1, 2 * STAGE_BARS + 1)]
    (found,) = report_of(many).runs
    assert (len(found.stages.bars), found.stages.bars[:3]) == (STAGE_BARS, ("1", "4", "5"))
    assert found.stages.notes[1] == f"{2 * STAGE_BARS} refits; of each 2 in a row the slowest is shown."


def test_of_loads_the_slowest_are_shown_each_by_itself():
    loads = [
        record(0, 0, path="load", host=f"n{n:03}", stages_s={"connect": 0.1, "wire": 1.0 + n}) for n in range(LOADS_KEPT + 9)
    ]
    assert [len(kept) for kept in evidence_of(loads).breakdown.loads.values()] == [LOADS_KEPT]
    (found,) = report_of(loads).runs
    assert found.stages.names == ("connect", "wire")
    assert (
        found.stages.bars[:2]
        == found.stages.ranks[:2]
        == (f"rank 0 on n{LOADS_KEPT + 8:03}", f"rank 0 on n{LOADS_KEPT + 7:03}")
    )
    assert (len(found.stages.bars), found.stages.notes) == (STAGE_BARS, (f"The slowest {STAGE_BARS} loads.",))


def test_links_are_pairs_of_source_and_reader_slowest_first_and_bytes_are_summed_by_source():
    fast, slow = peer("rank1", 100.0), peer("rank2", 20.0)
    records = [
        record(rank, step, peers=[fast, slow] if rank else [fast], transport="ucx:tcp") for step in (1, 2) for rank in (0, 1)
    ]
    (found,) = report_of(records).runs
    assert [(one.source, one.reader, one.transport, round(one.gbps, 3), one.transfers, one.where) for one in found.links] == [
        ("rank2", "rank 1", "ucx:tcp", 20.0, 2, "stdin:2"),
        ("rank1", "rank 0", "ucx:tcp", 100.0, 2, "stdin:1"),
        ("rank1", "rank 1", "ucx:tcp", 100.0, 2, "stdin:2"),
    ]
    assert [(one.source, one.wire_bytes, round(one.share, 3), one.readers, one.transfers) for one in found.sources] == [
        ("rank1", 4.0 * BYTES, 0.667, 2, 4),
        ("rank2", 2.0 * BYTES, 0.333, 1, 2),
    ]


def test_the_rate_of_a_link_is_all_its_bytes_over_all_its_seconds_and_its_lowest_is_named():
    records = [record(0, 1, peers=[peer("a", 100.0)]), record(0, 2, peers=[peer("a", 25.0)])]
    (found,) = report_of(records).runs
    assert [(round(one.gbps, 6), round(one.lowest, 6), one.where) for one in found.links] == [(40.0, 25.0, "stdin:2")]


@pytest.mark.parametrize(
    ("changed", "links", "sent"),
    [
        ({"verdict": "impossible", "gbps": 900.0}, 0, 0),
        ({"verdict": "unmeasured", "reason": "below_min_bytes"}, 0, 1),
        ({"verdict": "unmeasured", "reason": "no_link_rate"}, 1, 1),
        ({"verdict": "slow", "gbps": 50.0}, 1, 1),
    ],
)
def test_what_moved_nothing_has_no_bytes_and_what_was_too_small_has_no_rate(changed, links, sent):
    (found,) = report_of([record(0, 1, peers=[peer("a", 50.0)], **changed)]).runs
    assert (len(found.links), len(found.sources)) == (links, sent)


def test_an_alarm_whose_own_record_was_lost_brings_its_links_and_one_that_has_it_does_not_count_twice():
    whole = record(1, 2, 50.0, verdict="slow", peers=[peer("a", 50.0)])
    kept = {key: value for key, value in whole.items() if key not in ("armed", "floor", "ceiling", "verdict", "reason")}
    alarm = f"{SLOW_MARKER} {json.dumps({**kept, 'schema': SLOW_SCHEMA, 'floor_gbps': 100.0, 'shortfall_x': 2.0})}"
    for lines in ([alarm], [whole, alarm], [alarm, whole]):
        (found,) = report_of(lines).runs
        assert [one.transfers for one in found.links] == [1]


def test_what_the_records_name_is_shown_once():
    records = [
        record(rank, step, transport=f"ucx:tcp{rank % 2}", engine="vllm", policy="balanced")
        for step in (1, 2)
        for rank in range(3)
    ]
    (found,) = report_of(records).runs
    assert found.traits == (("engine", "vllm"), ("transport", "ucx:tcp0, ucx:tcp1"), ("policy", "balanced"))


def test_paths_with_most_transfers_out_of_bounds_come_first():
    records = [*run(), record(0, 1, 50.0, path="staged", verdict="slow"), *(record(model=f"m{n}") for n in range(RUNS))]
    report = report_of(records)
    assert (report.runs[0].path, report.runs[1].count) == ("staged", 24)
    assert (len(report.runs), report.runs_in_all) == (RUNS, RUNS + 2)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 1e-320, 1e308])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["source", "wire_bytes", "wire_s", "wire"]), inner)
    ),
    max_leaves=6,
)


@given(anything, anything, anything, anything)
def test_whatever_a_record_says_of_its_peers_and_stages_the_report_is_made(peers, stages, transport, step):
    records = [record(rank, step if rank else 1, peers=peers, stages_s=stages, transport=transport) for rank in range(3)]
    json.dumps(asdict(tabulate(evidence := evidence_of(records), judge(evidence, Wanted(), Limits()))), allow_nan=False)


@pytest.mark.parametrize("number", [10**400, 1e-320, 1e308, -(10**400)], ids=["huge", "tiny", "large", "below"])
@pytest.mark.parametrize("where", ["wire_bytes", "wire_s"])
def test_a_number_that_means_nothing_spoils_neither_a_sum_nor_the_page(number, where):
    wrong = {**peer("s1", 100.0), where: number}
    records = [
        record(0, step, peers=[wrong, peer("s2", 100.0)], stages_s={"wire": number, "plan": 1.0}) for step in range(1, 4)
    ]
    evidence = evidence_of(records)
    outcome = judge(evidence, Wanted(), Limits())
    assert "s2" in page_of(evidence, outcome)
    assert outcome.code == 0


@pytest.mark.parametrize(("ranks", "steps"), [(1, 1), (60, 12), (2, 700), (RANKS + 5, 2)])
def test_the_size_of_a_report_does_not_grow_with_the_run(ranks, steps):
    rates = [50.0, 120.0, 200.0, 900.0, 60.0]
    records = [
        record(
            rank,
            step,
            gbps,
            verdict="slow" if gbps < FLOOR else "impossible" if gbps > CEILING else "ok",
            host=f"n{rank}",
            peers=[peer(f"s{rank}-{n}", gbps) for n in range(3)],
            stages_s={f"stage{n}": 1.0 for n in range(40)},
        )
        for step in range(1, steps + 1)
        for rank in range(ranks)
        if (gbps := rates[(rank + step) % 5])
    ]
    report = report_of(records)
    (found,) = report.runs
    assert len(report.findings) == min(report.findings_in_all, FINDINGS)
    assert len(found.ranks) == min(ranks, RANKS)
    assert len(found.links) == min(found.links_in_all, LINKS)
    assert len(found.sources) == min(found.sources_in_all, SOURCES)
    assert len(found.stages.names) <= 16
    assert len(found.stages.bars) <= STAGE_BARS
    assert bool(found.rates) == (steps > 1)
    assert len(found.transfers) == (0 if steps > 1 else 1)
    if found.rates:
        assert len(found.rates.steps) <= POINTS
        assert len(found.rates.lines) <= RANKS_DRAWN
        assert len(found.rates.marks) == min(MARKS, sum(map(is_marked, records)))


def is_marked(one):
    return one["verdict"] in ("slow", "impossible")


def test_of_many_loads_the_slowest_transfers_are_shown():
    loads = [record(0, 0, 101.0 + n, path="load", host=f"n{n}") for n in range(2 * TRANSFERS)]
    (found,) = report_of(loads).runs
    assert [one.gbps for one in found.transfers] == [101.0 + n for n in range(TRANSFERS)]
