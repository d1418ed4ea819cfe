"""What `mx report` promises, and that `mx gate --html` writes the same page."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.cli.conftest import MX
from tests.pure.test_gate import SLOW, line, run


@pytest.fixture
def log(tmp_path):
    """The path of a log with a slow transfer."""
    path = tmp_path / "run.log"
    path.write_text("start\n" + "".join(line(one) + "\n" for one in run(of={(1, 2): SLOW})))
    return str(path)


def test_a_page_is_written_and_its_verdict_said_which_is_not_the_exit_code(mx, log, tmp_path):
    done = mx("report", log, "-o", str(tmp_path / "page.html"), COLUMNS="300")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{tmp_path / 'page.html'}: regression; 24 transfers: 23 ok, 1 slow. ")
    assert "<h1>regression</h1>" in (tmp_path / "page.html").read_text()


def test_the_gate_writes_the_same_page_and_keeps_its_exit_code(mx, log, tmp_path):
    options = ("--warmup", "1", "--expect-ranks", "5")
    assert mx("report", log, *options, "-o", str(tmp_path / "report.html")).code == 0
    assert mx("gate", log, *options, "--html", str(tmp_path / "gate.html")).code == 1
    assert (tmp_path / "report.html").read_bytes() == (tmp_path / "gate.html").read_bytes()


def test_the_figures_of_the_page_are_one_json_document(mx, log, tmp_path):
    done = mx("report", log, "-o", str(tmp_path / "page.html"), "--json")
    document = json.loads(done.out)
    assert (document["file"], document["verdict"]) == (str(tmp_path / "page.html"), "regression")
    assert document["runs"][0]["ranks"][0]["where"] == f"{log}:7"


def test_a_pipe_is_read(environment, tmp_path):
    command = [MX, "report", "-", "-o", str(tmp_path / "page.html")]
    text = "".join(line(one) + "\n" for one in run())
    done = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, "pass" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "Missing argument"),
        (("nowhere.log",), "nowhere.log does not exist"),
        (("-", "--warmup", "-1"), "warmup=-1"),
        (("-", "--expect-ranks", "a-b"), "--expect-ranks 'a-b'"),
        (("-", "-o", "/no/such/folder/page.html"), "/no/such/folder/page.html"),
    ],
)
def test_wrong_usage_is_64(mx, arguments, says):
    done = mx("report", *arguments)
    assert done.code == 64
    assert says in " ".join(done.err.split())


def test_without_plotly_the_extra_is_named_and_the_gate_does_not_call_it_a_regression(mx, log, tmp_path, blocked):
    without = {"PYTHONPATH": blocked("plotly")}
    report = mx("report", log, "-o", str(tmp_path / "page.html"), **without)
    gate = mx("gate", log, "--junit", str(tmp_path / "gate.xml"), "--html", str(tmp_path / "page.html"), **without)
    assert (report.code, gate.code) == (1, 64)
    for done in (report, gate):
        assert "pip install 'mx-adapters[report]'" in " ".join(done.err.replace("│", " ").split())
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["run.log"], (
        "it is said before anything is done"
    )
    assert mx("gate", log, **without).code == 1, "the gate itself needs none"


def test_help_teaches_by_examples(mx):
    out = mx("report", "--help").out
    assert all(words in out for words in ("mx report run.log", "exit 0", "exit 64", "mx gate", "--output"))
