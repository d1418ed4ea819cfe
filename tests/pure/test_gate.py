"""What the gate promises: it fails when it must, and only then."""

from __future__ import annotations

import gzip
import io
import json
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx_common.errors import ConfigError
from mx_common.floor import IMPOSSIBLE_MARKER, IMPOSSIBLE_SCHEMA, MARKER, SCHEMA, SLOW_MARKER, SLOW_SCHEMA
from mx_common.gate import Limits, Wanted, judge, read
from mx_common.gate.outputs import RULES, as_json, github, junit

FLOOR, CEILING, BYTES = 100.0, 800.0, 1 << 30


def record(rank=0, step=1, gbps=200.0, **more):
    """A transfer of 1 GiB at `gbps`, against a floor of 100."""
    seconds = round(BYTES * 8 / (gbps or 200.0) / 1e9, 6)
    known = {"schema": SCHEMA, "path": "reshard", "model": "m", "rank": rank, "step": step, "host": "h"}
    known |= {"verdict": "ok", "reason": None, "armed": True, "floor": FLOOR, "ceiling": CEILING}
    return {**known, "wire_bytes": BYTES, "wire_s": seconds, "implied_gbps": gbps, **more}


def run(ranks=4, steps=6, **of):
    """Records of a run; `of[(rank, step)]` changes one."""
    changed = of.get("of", {})
    return [record(rank, step, **changed.get((rank, step), {})) for step in range(1, steps + 1) for rank in range(ranks)]


def line(one):
    return f"{MARKER} {json.dumps(one)}"


def outcome_of(records, wanted=None, limits=None):
    text = "".join(line(one) + "\n" for one in records).encode()
    return judge(read(["-"], io.BytesIO(text)), wanted or Wanted(), limits or Limits())


def rules_of(outcome):
    return sorted({finding.rule for finding in outcome.findings})


SLOW = {"verdict": "slow", "gbps": 50.0}
UNMEASURED = {"verdict": "unmeasured", "reason": "below_min_bytes", "wire_bytes": 1000}
NO_LINK = {"verdict": "unmeasured", "reason": "no_link_rate", "floor": None, "armed": False}
HALF = {(2, step): {"gbps": 90.0, "floor": 80.0} for step in (1, 2, 3)}
FEWER = {(2, step): {"gbps": 90.0, "floor": 80.0} for step in (1, 2)}
LATER = {(rank, step): {"gbps": 160.0} for rank in range(4) for step in (5, 6)}
LITTLE = {(rank, step): {"gbps": 170.0} for rank in range(4) for step in (5, 6)}
WARM = {(rank, 1): SLOW for rank in range(4)}


@pytest.mark.parametrize(
    ("records", "wanted", "limits", "code", "rules"),
    [
        pytest.param(run(), Wanted(), Limits(), 0, [], id="a fast run passes"),
        pytest.param([], Wanted(), Limits(), 2, ["empty"], id="no record is no evidence"),
        pytest.param(run(of={(1, 2): SLOW}), Wanted(), Limits(), 1, ["slow"], id="one slow transfer fails"),
        pytest.param(run(of={(1, 2): SLOW}), Wanted(), Limits(max_slow_share=0.05), 0, [], id="a share may be slow"),
        pytest.param(run(of={(1, 2): SLOW, (1, 3): SLOW}), Wanted(), Limits(max_slow_share=0.05), 1, ["slow"], id="not more"),
        pytest.param(run(of=WARM), Wanted(), Limits(warmup=1), 0, [], id="warm-up steps are dropped when asked"),
        pytest.param(run(of=WARM), Wanted(), Limits(), 1, ["slow"], id="and only then"),
        pytest.param(run(steps=2), Wanted(), Limits(warmup=2), 2, ["empty"], id="a run that is all warm-up is no evidence"),
        pytest.param(run(of={(0, 1): {"verdict": "impossible", "gbps": 900.0}}), Wanted(), Limits(warmup=1), 1, ["impossible"],
                     id="impossible fails in any step"),
        pytest.param(run(of=HALF), Wanted(), Limits(), 1, ["straggler"], id="under half the median in half of its steps"),
        pytest.param(run(of=FEWER), Wanted(), Limits(), 0, [], id="in fewer steps it is chance"),
        pytest.param(run(ranks=1, of={(0, 1): {"gbps": 400.0}}), Wanted(), Limits(), 1, ["drift"], id="one rank has no cohort"),
        pytest.param(run(of=LATER), Wanted(), Limits(), 1, ["drift"], id="the last third takes 1.25 x the first"),
        pytest.param(run(of=LITTLE), Wanted(), Limits(), 0, [], id="1.18 x is no drift"),
        pytest.param(run(steps=2, of={(rank, 2): {"gbps": 101.0} for rank in range(4)}), Wanted(), Limits(), 0, [],
                     id="two steps have no thirds"),
        pytest.param(run(of={(1, 2): UNMEASURED}), Wanted(), Limits(), 2, ["unmeasured"], id="unmeasured is no evidence"),
        pytest.param(run(of={(1, 2): UNMEASURED}), Wanted(), Limits(allow_unmeasured=True), 0, [], id="small ones may be"),
        pytest.param(run(of={(1, 2): NO_LINK}), Wanted(), Limits(allow_unmeasured=True), 2, ["unmeasured"], id="others not"),
        pytest.param(run(of={(1, 2): {"armed": False, "floor": 0.0}}), Wanted(), Limits(), 2, ["floor"], id="without a floor"),
        pytest.param(run(), Wanted(ranks=frozenset(range(4))), Limits(), 0, [], id="all expected ranks are there"),
        pytest.param(run(), Wanted(ranks=frozenset(range(5))), Limits(), 2, ["missing"], id="a rank is missing"),
        pytest.param(run()[:-1], Wanted(ranks=frozenset(range(4))), Limits(), 2, ["missing"], id="in one step only"),
        pytest.param(run(), Wanted(steps=frozenset(range(1, 7))), Limits(), 0, [], id="all expected steps are there"),
        pytest.param(run(), Wanted(steps=frozenset(range(1, 8))), Limits(), 2, ["missing"], id="a step is missing"),
        pytest.param(run(), Wanted(step_count=6), Limits(), 0, [], id="as many steps as expected"),
        pytest.param(run(), Wanted(step_count=7), Limits(), 2, ["missing"], id="one step less than expected"),
        pytest.param(run(), Wanted(paths=frozenset({"reshard"})), Limits(), 0, [], id="the expected path is there"),
        pytest.param(run(), Wanted(paths=frozenset({"reshard", "load"})), Limits(), 2, ["missing"], id="a path is missing"),
        pytest.param(run(of={(1, 2): SLOW, (1, 3): UNMEASURED}), Wanted(), Limits(), 1, ["slow", "unmeasured"], id="1 wins over 2"),
    ],
)  # fmt: skip
def test_each_rule_fails_a_run_when_it_must_and_only_then(records, wanted, limits, code, rules):
    outcome = outcome_of(records, wanted, limits)
    assert (outcome.code, rules_of(outcome)) == (code, rules), outcome.findings


PREFIXES = [
    "",
    "INFO 11-30 15:02:11 [loader.py:57] ",
    "\x1b[36m(Worker_TP1 pid=311)\x1b[0m \x1b[32mINFO\x1b[0m ",
    "2026-11-30T15:02:11.123456789Z stdout F ",
    "[pod/rollout-7d9c/engine] ",
    "\x1b[36m(RayTrainWorker pid=88, ip=10.0.0.3)\x1b[0m ",
    "[rank3]: ",
    "[default3]:[INFO|x.py:3] 2026-11-30 >> ",
]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("ending", ["\n", "\r\n", " \x1b[0m\n"], ids=["lf", "crlf", "colour"])
@pytest.mark.parametrize("marked", [True, False], ids=["a log", "a file of records"])
def test_a_record_is_found_behind_any_prefix(prefix, ending, marked):
    text = prefix + (line(record()) if marked else json.dumps(record())) + ending
    (found,) = read(["-"], io.BytesIO(b"noise\n" + text.encode())).transfers
    assert (found.path, found.rank, found.gbps, found.where) == ("reshard", 0, 200.0, "stdin:2")


def test_two_processes_on_one_line_are_two_records_and_one_that_was_cut_is_named():
    both = line(record(rank=0)) + line(record(rank=1)) + "\n"
    cut = line(record(rank=2))[:120] + line(record(rank=3)) + "\n"
    evidence = read(["-"], io.BytesIO((both + cut).encode()))
    assert [transfer.rank for transfer in evidence.transfers] == [0, 1, 3]
    assert [(trouble.what, trouble.line) for trouble in evidence.troubles] == [("truncated record", 2)]


@pytest.mark.parametrize("name", ["wire_s", "wire_bytes", "implied_gbps"])
def test_a_number_that_no_machine_can_hold_is_no_record_and_no_crash(name):
    outcome = outcome_of([*run(), record(9, 1, **{name: 10**400})])
    assert (outcome.code, rules_of(outcome)) == (2, ["record"])


@pytest.mark.parametrize(("name", "code"), [("floor", 2), ("ceiling", 0)])
def test_a_bound_that_no_machine_can_hold_is_no_bound(name, code):
    assert outcome_of([record(0, 1, **{name: 10**400})]).code == code


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ({"implied_gbps": None}, "ok without bytes, seconds or a rate"),
        ({"wire_s": None}, "ok without bytes, seconds or a rate"),
        ({"wire_bytes": 0}, "ok without bytes, seconds or a rate"),
        ({"implied_gbps": 9999.0}, "ok at 9999 Gbit/s, with a ceiling of 800"),
        ({"implied_gbps": 50.0}, "ok at 50 Gbit/s, with a floor of 100"),
        ({"verdict": "slow"}, "slow at 200 Gbit/s, with a floor of 100"),
        ({"verdict": "slow", "implied_gbps": 50.0, "armed": False}, "slow at 50 Gbit/s, with a floor of 100"),
        ({"floor": 0.0}, "a floor is in force, and none is given"),
        ({"floor": None}, "a floor is in force, and none is given"),
    ],
)
def test_a_verdict_that_does_not_follow_from_its_own_figures_is_no_evidence(said, what):
    outcome = outcome_of([*run(), record(9, 1, **said)])
    assert outcome.code == 2
    assert [finding.text for finding in outcome.findings] == [f"a record that contradicts itself: {what}"]


@pytest.mark.parametrize("rate", [99.95, 100.0, 800.04])
def test_a_rate_that_was_rounded_contradicts_nothing(rate):
    assert outcome_of([record(gbps=rate)]).code == 0


LOADS = [record(rank, 0, path="load") for rank in range(4)]
SLOW_LOADS = [record(rank, 0, path="load", **SLOW) for rank in range(4)]
OTHER = [record(0, step, model="b") for step in range(1, 7)]
EVERY = Wanted(ranks=frozenset(range(4)), step_count=6)


@pytest.mark.parametrize(
    ("records", "wanted", "limits", "code"),
    [
        pytest.param([*run(), *LOADS], EVERY, Limits(), 0, id="loads belong to no step, so they lack none"),
        pytest.param([*run(), *LOADS], EVERY, Limits(warmup=1), 0, id="and are never warm-up"),
        pytest.param([*run(), *SLOW_LOADS], EVERY, Limits(warmup=1), 1, id="slow loads fail with any warm-up"),
        pytest.param([*run(), *LOADS[1:]], EVERY, Limits(), 2, id="a rank that did not load is missing"),
        pytest.param([*run(), *LOADS[1:]], Wanted(EVERY.ranks, paths=frozenset({"reshard"})), Limits(), 0,
                     id="unless loads are not expected"),
        pytest.param([*run(), *OTHER], EVERY, Limits(), 2, id="one model does not hide what another lacks"),
        pytest.param([*run(steps=2), *LOADS], Wanted(), Limits(warmup=2), 2, id="a path that is all warm-up is no evidence"),
        pytest.param([record(**UNMEASURED)], Wanted(), Limits(allow_unmeasured=True), 2, id="nothing measured is no evidence"),
        pytest.param([*run(), record(9, 1, **UNMEASURED, armed=False, floor=0.0)], Wanted(), Limits(allow_unmeasured=True), 2,
                     id="a small one without a floor is none either"),
        pytest.param(run(of={(rank, step): {"wire_s": 0.0} for rank in range(4) for step in (1, 2)}), Wanted(), Limits(), 0,
                     id="no time at all is nothing to compare with"),
    ],
)  # fmt: skip
def test_loads_models_and_small_transfers_are_judged_as_what_they_are(records, wanted, limits, code):
    outcome = outcome_of(records, wanted, limits)
    assert outcome.code == code, outcome.findings


@pytest.mark.parametrize("wanted", [{"ranks": frozenset()}, {"steps": frozenset()}, {"step_count": 0}, {"paths": frozenset()}])
def test_an_expectation_of_nothing_is_refused(wanted):
    with pytest.raises(ConfigError, match="nothing is expected"):
        Wanted(**wanted)


def test_a_message_inside_a_json_log_line_is_read():
    text = json.dumps({"level": "info", "message": line(record(rank=5))}) + "\n"
    assert [transfer.rank for transfer in read(["-"], io.BytesIO(text.encode())).transfers] == [5]


def test_text_that_only_speaks_of_records_is_none():
    text = f'grep {MARKER} run.log\nthe schema is refit-throughput-v1\n{{"schema": "other"}}\n'
    evidence = read(["-"], io.BytesIO(text.encode()))
    assert (evidence.transfers, evidence.troubles) == ([], [])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (f'{MARKER} {{"schema": "refit-throu', "truncated record"),
        (f"{MARKER}", "truncated record"),
        ('{"schema": "refit-throughput-v1", "path": "load", "wire', "truncated record"),
        (line(record(schema="refit-throughput-v9")), "unknown schema 'refit-throughput-v9'"),
        (line(record(verdict="fine")), "a record without a valid verdict"),
        (line(record(wire_s="soon")), "a record without a valid wire_s"),
        (line({"schema": SCHEMA}), "a record without a valid path, verdict, armed"),
        (line(record(schema={})), "truncated record"),
        (line(record(schema=["x"])), "truncated record"),
        (line(record(verdict=[])), "a record without a valid verdict"),
        (line(record(rank="3", step="4")), "a record without a valid rank, step"),
        (line(record(path="")), "a record without a valid path"),
        (line(record(wire_s=-1, implied_gbps=-5)), "a record without a valid wire_s, implied_gbps"),
    ],
)
def test_a_record_that_is_truncated_or_foreign_is_named_with_file_and_line(text, what, tmp_path):
    (tmp_path / "run.log").write_text("first\n" + text + "\n")
    outcome = judge(read([str(tmp_path / "run.log")]), Wanted(), Limits())
    (finding,) = [finding for finding in outcome.findings if finding.rule == "record"]
    assert (finding.text, finding.file, finding.line) == (what, str(tmp_path / "run.log"), 2)
    assert outcome.code == 2


def test_files_folders_and_gzip_are_read_and_a_transfer_written_twice_counts_once(tmp_path):
    (tmp_path / "logs" / "node1").mkdir(parents=True)
    (tmp_path / "logs" / "node1" / "run.log").write_text("".join(line(one) + "\n" for one in run(ranks=2, steps=3)))
    (tmp_path / "logs" / "records.jsonl").write_text("".join(json.dumps(one) + "\n" for one in run(ranks=2, steps=3)))
    (tmp_path / "more.log.gz").write_bytes(gzip.compress((line(record(rank=7)) + "\n").encode()))
    evidence = read([str(tmp_path / "logs"), str(tmp_path / "more.log.gz")])
    assert len(evidence.transfers) == 7
    assert evidence.troubles == []


def test_a_pipe_that_only_begins_like_gzip_is_no_evidence():
    outcome = judge(read(["-"], io.BytesIO(b"\x1f\x8b rest")), Wanted(), Limits())
    assert (outcome.code, rules_of(outcome)) == (2, ["empty", "record"])


def test_a_gzip_file_that_was_cut_is_no_evidence(tmp_path):
    noise = "".join(f"{n} {hash(str(n))}\n" for n in range(2000))
    (tmp_path / "run.gz").write_bytes(gzip.compress((line(record()) + "\n" + noise).encode())[:-2000])
    outcome = judge(read([str(tmp_path / "run.gz")]), Wanted(), Limits())
    assert (outcome.code, rules_of(outcome)) == (2, ["record"])


def test_an_input_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read([str(tmp_path / "nowhere.log")])


def test_an_alarm_whose_own_record_was_lost_still_fails_and_one_that_has_it_counts_once():
    shared = {"model": "m", "rank": 1, "step": 2, "path": "staged", "wire_bytes": BYTES, "wire_s": 0.17, "implied_gbps": 50.0}
    alarm = f"{SLOW_MARKER} {json.dumps({**shared, 'schema': SLOW_SCHEMA, 'floor_gbps': 100.0, 'shortfall_x': 2.0})}\n"
    whole = line(record(rank=1, step=2, gbps=50.0, verdict="slow", wire_s=0.17)) + "\n"
    for text, count in ((alarm, 1), (whole + alarm, 1)):
        evidence = read(["-"], io.BytesIO(text.encode()))
        assert len(evidence.transfers) == count
        assert judge(evidence, Wanted(), Limits()).code == 1
    gone = f"{IMPOSSIBLE_MARKER} {json.dumps({**shared, 'schema': IMPOSSIBLE_SCHEMA, 'ceiling_gbps': 10.0, 'excess_x': 5.0})}\n"
    assert rules_of(judge(read(["-"], io.BytesIO(gone.encode())), Wanted(), Limits())) == ["impossible"]


@given(st.binary(max_size=200), st.integers(0, 3))
def test_no_input_breaks_the_reader_and_no_record_is_lost_among_noise(noise, place):
    lines = [b"> " + noise.replace(b"\n", b" ").replace(b"{", b"(")] * 3
    lines.insert(place, line(record(rank=9)).encode())
    evidence = read(["-"], io.BytesIO(b"\n".join(lines)))
    assert [transfer.rank for transfer in evidence.transfers] == [9]


@pytest.mark.parametrize(("field", "value"), [("max_slow_share", 1.5), ("max_slow_share", -0.1), ("warmup", -1)])
def test_limits_that_mean_nothing_are_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        Limits(**{field: value})


def test_other_forms_say_the_same_and_escape_what_they_carry():
    hostile = record(rank=1, step=2, gbps=50.0, verdict="slow", model="<m>&\x01%\n::error::", path="re%shard")
    outcome = outcome_of([*run(), hostile])
    document = as_json(outcome)
    assert (document["verdict"], document["code"], document["transfers"]) == ("regression", 1, {"ok": 24, "slow": 1})
    suite = ElementTree.fromstring(junit(outcome))
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == (str(len(RULES)), "1", "0")
    (annotation,) = github(outcome)
    assert annotation.startswith(
        "::error file=stdin,line=25,title=mx gate%3A slow::re%25shard rank 1 step 2: 50.0 Gbit/s is below"
    )
    assert "\n" not in annotation


def test_a_line_that_is_nested_deeper_than_python_reads_is_no_record_and_no_crash():
    deep = '{"a": ' + "[" * 100_000 + "]" * 100_000 + f', "message": "{MARKER} x"}}\n'
    outcome = judge(
        read(["-"], io.BytesIO(deep.encode() + "".join(line(one) + "\n" for one in run()).encode())), Wanted(), Limits()
    )
    assert outcome.code == 0
