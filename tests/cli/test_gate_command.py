"""What `mx gate` promises: exit codes, a table that a person reads, forms for other programs."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest

from mx_common.cli import gate, main
from tests.cli.conftest import MX
from tests.pure.test_gate import SLOW, line, record, run


@pytest.fixture
def log(tmp_path):
    """Writes a log of records; its path."""

    def write(records, name="run.log"):
        (tmp_path / name).write_text("start\n" + "".join(line(one) + "\n" for one in records))
        return str(tmp_path / name)

    return write


def test_a_run_that_passes_says_what_was_judged(mx, log):
    done = mx("gate", log(run()), "--expect-ranks", "4", "--expect-steps", "6", "--expect-paths", "reshard")
    assert (done.code, done.err) == (0, "")
    headings, row, verdict = done.out.splitlines()
    assert headings.split() == ["path", "model", "transfers", "ranks", "steps", "lowest", "median", "floor"]
    assert row.split() == ["reshard", "m", "24", "4", "6", "200.0", "200.0", "100"]
    assert verdict == "pass: 24 transfers (24 ok)"


def test_the_slowest_transfer_comes_first_with_its_place(mx, log):
    path = log(run(of={(1, 2): SLOW, (3, 4): {**SLOW, "gbps": 20.0}}))
    done = mx("gate", path, COLUMNS="200")
    assert done.code == 1
    lines = done.out.splitlines()
    first = "reshard rank 3 step 4: 20.0 Gbit/s is below the floor of 100 Gbit/s"
    assert lines[1].split() == ["slow", *first.split(), f"{path}:17"]
    assert lines[-1] == "regression: 24 transfers (22 ok, 2 slow)"


def test_no_evidence_is_exit_2_and_a_regression_wins_over_it(mx, log):
    assert mx("gate", log([])).code == 2
    assert mx("gate", log(run()), "--expect-ranks", "0-5").code == 2
    assert mx("gate", log(run(of={(1, 2): SLOW})), "--expect-ranks", "0-5").code == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "Missing argument"),
        (("nowhere.log",), "nowhere.log does not exist"),
        (("-", "--warmup", "-1"), "warmup=-1"),
        (("-", "--max-slow-share", "2"), "max_slow_share=2"),
        (("-", "--expect-ranks", "a-b"), "--expect-ranks 'a-b'"),
        (("-", "--expect-steps", "9-1"), "--expect-steps '9-1'"),
        (("-", "--expect-steps", "0"), "nothing is expected"),
        (("-", "--expect-ranks", "0"), "nothing is expected"),
        (("-", "--expect-ranks", "²"), "--expect-ranks '²'"),
        (("-", "--expect-paths", ","), "nothing is expected"),
        (("-", "--no-such-option"), "No such option"),
        (("-", "--junit", "/no/such/folder/gate.xml"), "/no/such/folder/gate.xml"),
    ],
)
def test_wrong_usage_is_64_and_never_2(mx, arguments, says):
    done = mx("gate", *arguments)
    assert done.code == 64
    assert says in " ".join(done.err.split())


def test_a_pipe_is_read_and_json_junit_and_annotations_are_written(environment, tmp_path):
    text = "".join(line(one) + "\n" for one in run(of={(1, 2): SLOW}))
    command = [MX, "gate", "-", "--json", "--junit", str(tmp_path / "gate.xml"), "--github"]
    done = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert json.loads(done.stdout)["verdict"] == "regression"
    assert done.stderr.startswith("::error file=stdin,line=6,title=mx gate%3A slow::reshard rank 1 step 2: 50.0 Gbit/s")
    assert 'failures="1"' in (tmp_path / "gate.xml").read_text()


def test_help_teaches_the_exit_codes(mx):
    out = mx("gate", "--help").out
    assert all(words in out for words in ("exit 1", "exit 2", "exit 64", "--expect-ranks"))


def test_a_fault_of_the_gate_itself_is_no_evidence_and_no_regression(monkeypatch, capsys):
    def fails(*_):
        raise ZeroDivisionError("in a rule")

    monkeypatch.setattr(gate, "judged", fails)
    monkeypatch.setattr("sys.argv", ["mx", "gate", "run.log"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "ZeroDivisionError('in a rule')" in " ".join(capsys.readouterr().err.split())


def test_what_a_record_says_is_no_command_of_a_github_job(mx, tmp_path):
    (tmp_path / "run.log").write_text(line(record(path="::error::pwn")) + "\n")
    out = mx("gate", str(tmp_path / "run.log"), "--github").out
    token = re.match(r"::stop-commands::(\w+)\n", out)[1]
    assert out.index("::error::pwn") < out.index(f"\n::{token}::\n")


@pytest.mark.parametrize(("records", "code"), [(run(), 0), (run(of={(1, 2): SLOW}), 1)])
def test_the_exit_code_is_the_verdict_whoever_reads_the_output(environment, tmp_path, records, code):
    (tmp_path / "run.log").write_text("".join(line(one) + "\n" for one in records))
    for target in ("/dev/full", "pipe"):
        reads, writes = os.pipe()
        os.close(reads)
        out = open(target, "wb") if target != "pipe" else os.fdopen(writes, "wb")  # noqa: SIM115
        command = [MX, "gate", str(tmp_path / "run.log")]
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, env=environment, check=False, timeout=120)
        assert done.returncode == code, (target, done.stderr)
