"""What the gate reads: every record that a job left behind is counted, and what may have been one is named."""

from __future__ import annotations

import bz2
import json
import logging
import lzma
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx_common._records import emit
from mx_common.errors import ConfigError
from mx_common.floor import INSTALLED_MARKER, INSTALLED_SCHEMA, MARKER, SCHEMA, WireTransfer, check
from mx_common.gate import Limits, Wanted, judge, read

REST = {"path": "reshard", "verdict": "ok", "reason": None, "armed": True, "floor": 100.0, "ceiling": 800.0}
PEERS = [{"source": "a", "wire_bytes": 1 << 29, "wire_s": 0.02}, {"source": "b", "wire_bytes": 1 << 29, "wire_s": 0.02}]


def record(rank=0):
    known = {"schema": SCHEMA, "model": "m", "rank": rank, "step": 1, "host": "h", "peers": PEERS, "stages_s": {"wait": 0.1}}
    return {**known, **REST, "wire_bytes": 1 << 30, "wire_s": 0.043, "implied_gbps": 200.0}


def bare(rank=0):
    return json.dumps(record(rank))


def marked(rank=0):
    return f"{MARKER} {bare(rank)}"


def quoted(text):
    return json.dumps(text)


def seen(tmp_path, text):
    """Ranks that were counted, and whether the gate may be green."""
    file = tmp_path / "run.log"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    evidence = read([str(file)])
    for trouble in evidence.troubles:
        assert (trouble.file, trouble.line >= 1, bool(trouble.what)) == (str(file), True, True)
    outcome = judge(evidence, Wanted(), Limits())
    assert outcome.code == (2 if evidence.troubles or not evidence.transfers else 0)
    return sorted(transfer.rank for transfer in evidence.transfers), len(evidence.troubles)


HALF = bare(8)[:200]
TS = "2026-01-01T00:00:00.123456789Z"
WHOLE = {
    "two records without a newline between": (bare(0) + bare(1), [0, 1]),
    "an array on one line": (json.dumps([record(0), record(1)], separators=(",", ":")), [0, 1]),
    "a marked record, then a bare one": (f"{marked(0)} {bare(1)}", [0, 1]),
    "a bare record, then a marked one": (f"{bare(0)} {marked(1)}", [0, 1]),
    "a word after the marker": (f"{MARKER}: record {bare(0)}", [0]),
    "in single quotes": (f"{MARKER} '{bare(0)}'", [0]),
    "JSON behind a prefix": ("[pod/rollout-0/c] " + json.dumps({"ts": 1, "message": f"INFO {marked(0)}"}), [0]),
    "JSON behind what CRI puts there": (f"{TS} stdout F " + json.dumps({"ts": 1, "message": marked(0)}), [0]),
    "a message one level down": (json.dumps({"log": {"message": marked(0)}}), [0]),
    "a message two levels down": (json.dumps({"a": {"b": [{"message": marked(0)}]}}), [0]),
    "JSON in the string of JSON": (json.dumps({"log": json.dumps({"message": marked(0)}) + "\n"}), [0]),
    "logfmt": (f"level=info msg={quoted(marked(0))} n=1", [0]),
    "logfmt with a JSON message": (f"level=info msg={quoted(json.dumps({'message': marked(0)}))}", [0]),
    "two of logfmt in one line": (f"msg={quoted(marked(0))} msg={quoted(marked(1))}", [0, 1]),
    "logfmt with escapes that JSON has not": (f'msg="\\x1b[32m{quoted(marked(0))[1:-1]}\\x1b[0m"', [0]),
    "a JSON message without a marker": (json.dumps({"message": bare(0)}), [0]),
    "a record as the value of a JSON log line": (json.dumps({"ts": 1, "record": record(0)}), [0]),
    "a marker and its record as two values": (json.dumps({"msg": "%s %s", "args": [MARKER, bare(0)]}), [0]),
    "behind braces of a prefix": (f"INFO {{rank 3}} {{}} {marked(0)}", [0]),
    "two messages of one JSON line": (json.dumps({"a": marked(0), "b": marked(1)}), [0, 1]),
}  # fmt: skip


@pytest.mark.parametrize("ending", ["\n", "\r\n", ""], ids=["lf", "crlf", "no newline"])
@pytest.mark.parametrize("name", WHOLE)
def test_every_record_of_a_line_is_counted_and_nothing_else_is_said(name, ending, tmp_path):
    text, ranks = WHOLE[name]
    assert seen(tmp_path, f"first\n{text}{ending}") == (ranks, 0)


BROKEN = {
    "half a record, then a whole one": (HALF + bare(0), [0], 1),
    "the same, both marked": (f"{MARKER} {HALF}{marked(0)}", [0], 1),
    "a start, then a whole one": ('{"sch' + bare(0), [0], 1),
    "a whole one, then half of one": (bare(0) + HALF, [0], 1),
    "a marker, then a marked record": (f"INFO {MARKER} INFO {marked(0)}", [0], 1),
    "half a marker, then a marked record": (f"INFO {MARKER[:-3]}INFO {marked(0)}", [0], 1),
    "half a marker at the end of a line": (f"{marked(0)}\nINFO {MARKER[:-3]}", [0], 1),
    "a marker at the end of a line": (f"{marked(0)}\nINFO {MARKER} ", [0], 1),
    "a line without its head": (f"{bare(0)[150:]}\n{bare(1)}", [1], 1),
    "a line with its last key only": (f"{bare(0)[-24:]}\n{bare(1)}", [1], 1),
    "a JSON message without its head": (f"{json.dumps({'m': bare(0)})[150:]}\n{bare(1)}", [1], 1),
    "damage within": (f"{bare(0)}\n{bare(1).replace('peers', '#', 1).replace('[', '', 1)}", [0], 1),
    "Python's braces": (f"{bare(0)}\n{MARKER} {record(1)}", [0], 1),
    "logfmt that was cut": (f"{bare(0)}\nmsg={quoted(marked(1))[:200]}", [0], 1),
    "a line that CRI split": (f"{TS} stdout P {marked(0)[:300]}\n{TS} stdout F {marked(0)[300:]}\n{bare(1)}", [1], 2),
    "a line that CRI split in the marker": (f"{bare(1)}\n{TS} stderr P INFO MX_REF", [1], 1),
    "a line that Ray repeats": (f"(W pid=1) {marked(0)} [repeated 7x across cluster]", [0], 1),
    "the same, with Ray's hint": (f"{marked(0)} [repeated 7x across cluster] (Ray deduplicates logs by default.)", [0], 1),
    "digits beyond Python's": (f"{bare(0)}\n" + bare(1).replace('"rank": 1', '"rank": ' + "1" * 5000), [0], 1),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_record_that_is_not_whole_is_named_and_those_beside_it_are_counted(name, tmp_path):
    text, ranks, troubles = BROKEN[name]
    assert seen(tmp_path, text + "\n") == (ranks, troubles)


@pytest.mark.parametrize(
    "text",
    [
        f"grep {MARKER} run.log",
        f"+ grep {MARKER} run.log | awk '{{print $1}}'",
        f"grep -E '{MARKER}|{INSTALLED_MARKER}' run.log",
        "MX_REFIT_WAIT_SECONDS=60 MX_REFIT_SHADOW=1 MX_RESHARD_MIN_GBPS=100",
        "the schema is refit-throughput-v1, with wire_s and implied_gbps",
        json.dumps({"wire_bytes": 5, "wire_s": 0.1, "implied_gbps": 3.0}),
        "(W pid=1) loaded [repeated 7x across cluster]",
        f"{TS} stdout P loading weights",
        '{"schema": "other"} {"schema": 5} {"schema": {"a": 1}}',
        '    "implied_gbps": 3.0,',
    ],
)
def test_what_is_no_record_is_no_trouble(text, tmp_path):
    assert seen(tmp_path, f"{text}\n{marked(0)}\n") == ([0], 0)


WRAPPED = {
    "a file of records": bare(1),
    "a log": f"2026-01-01 INFO [floor.py:3] {marked(1)}",
    "a JSON log": json.dumps({"message": f"INFO {marked(1)}"}),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_log_that_was_cut_anywhere_in_its_last_record_is_never_green_for_less(name, tmp_path):
    line = WRAPPED[name]
    first = line.index("MX_") + 3 if "MX_" in line else 1
    whole = max(line.rindex("}", 0, -1) if name == "a JSON log" else len(line), first)
    for stop in [*range(first, min(first + 60, whole)), *range(first + 60, whole, 7), whole - 1]:
        ranks, troubles = seen(tmp_path, f"noise\n{bare(0)}\n{line[:stop]}")
        assert (ranks, troubles) == ([0], 1), line[:stop]


@pytest.mark.parametrize("text", ["noise", "", "loading MX", "done {}", "a {b} c"])
def test_a_last_line_without_a_newline_that_is_no_record_is_no_trouble(text, tmp_path):
    assert seen(tmp_path, f"{bare(0)}\n{text}") == ([0], 0)


def test_a_tail_of_a_file_names_the_record_it_cut(tmp_path):
    text = f"{bare(0)}\n{bare(1)}\n"
    for start in range(1, len(bare(0)) - 24, 9):
        assert seen(tmp_path, text[start:]) == ([1], 1), text[start:]


@given(st.lists(st.sampled_from(["half", "bare", "marked", "quoted", "json"]), max_size=5), st.integers(40, 600))
def test_pieces_in_one_line_are_each_counted_or_named(pieces, cut):
    text, ranks, halves = "", [], 0
    for rank, piece in enumerate(pieces):
        one = {
            "half": bare(rank)[: min(cut, len(bare(rank)) - 1)],
            "bare": bare(rank),
            "marked": marked(rank),
            "json": json.dumps({"m": bare(rank)}),
        }
        text += one.get(piece) or f"msg={quoted(marked(rank))}"
        text += " "
        halves += piece == "half"
        ranks += [] if piece == "half" else [rank]
    with tempfile.TemporaryDirectory() as folder:
        counted, troubles = seen(Path(folder), text + "\n")
    assert set(counted) <= set(ranks)
    assert troubles if halves else (counted, troubles) == (ranks, 0)


def test_all_records_begin_with_their_schema(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MX_RECORDS_FILE", str(tmp_path / "{pid}.jsonl"))
    monkeypatch.setenv("MX_RESHARD_MIN_GBPS", "100000")
    log = logging.getLogger("caller")
    caplog.set_level(logging.INFO)
    check(WireTransfer("load", 1 << 30, 1.0, {"schema": "mine", "zone": "a", "rank": 0}), log)
    emit(INSTALLED_MARKER, {"path": "load", "schema": INSTALLED_SCHEMA}, log, logging.INFO)
    (file,) = tmp_path.iterdir()
    lines = file.read_text().splitlines()
    assert [re.match(r'\{"schema": "(refit-[a-z-]+)-v1"', line)[1] for line in lines] == [
        "refit-throughput", "refit-slow-throughput", "refit-installed",
    ]  # fmt: skip
    assert [re.search(r"MX_\w+ (.*)", message)[1] for message in caplog.messages if "MX_REFIT" in message] == lines


def test_files_are_read_when_stdin_is_closed_and_a_pipe_is_refused(tmp_path):
    (tmp_path / "run.log").write_text(marked(0) + "\n")
    program = "import sys; from mx_common.gate import read; print(sys.stdin, len(read([sys.argv[1]]).transfers))"
    for source, out, error in ((tmp_path / "run.log", "None 1\n", ""), ("-", "", "stdin is closed")):
        command = ["sh", "-c", 'exec "$0" "$@" <&-', sys.executable, "-c", program, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.stdout == out, done.stderr
        assert error in done.stderr


def test_linked_folders_are_read_once_and_loops_end(tmp_path):
    outside, logs = tmp_path / "outside", tmp_path / "logs"
    (outside / "deep").mkdir(parents=True)
    logs.mkdir()
    (outside / "deep" / "a.log").write_text(marked(1) + "\n" + HALF + "\n")
    (logs / "b.log").write_text(marked(0) + "\n")
    (logs / "linked").symlink_to(outside)
    (logs / "again").symlink_to(outside)
    (outside / "deep" / "loop").symlink_to(logs)
    evidence = read([str(logs)])
    assert sorted(transfer.rank for transfer in evidence.transfers) == [0, 1]
    assert [trouble.file for trouble in evidence.troubles] == [str(logs / "again" / "deep" / "a.log")]


def test_a_link_to_nothing_in_a_folder_is_named(tmp_path):
    (tmp_path / "a.log").write_text(marked(0) + "\n")
    (tmp_path / "b.log").symlink_to(tmp_path / "gone.log")
    (trouble,) = read([str(tmp_path)]).troubles
    assert (trouble.file, trouble.line) == (str(tmp_path / "b.log"), 1)


def test_a_folder_in_a_folder_that_cannot_be_read_is_refused_by_name():
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        inner = Path(name, "node1")
        inner.mkdir()
        Path(name, "a.log").write_text(marked(0) + "\n")
        assert len(read([name]).transfers) == 1
        inner.chmod(0)
        root = os.geteuid() == 0
        try:
            if root:
                os.seteuid(65534)
            with pytest.raises(ConfigError, match="node1 cannot be read"):
                read([name])
        finally:
            if root:
                os.seteuid(0)
            inner.chmod(0o700)


@pytest.mark.parametrize("pack", [bz2.compress, lzma.compress], ids=["bz2", "xz"])
def test_packed_files_are_read_and_those_that_were_cut_are_named(pack, tmp_path):
    noise = "".join(f"{n} {hash(str(n))}\n" for n in range(2000))
    packed = pack(f"{marked(0)}\n{noise}{marked(1)}\n".encode())
    assert seen(tmp_path, packed) == ([0, 1], 0)
    assert seen(tmp_path, packed[:-2000])[1] == 1
    assert seen(tmp_path, packed[:2000] + bytes(500) + packed[2500:])[1] == 1


@pytest.mark.parametrize(
    ("head", "advice"),
    [(b"\x28\xb5\x2f\xfd", "zstd -d"), (b"PK\x03\x04", "unzip"), (b"\xff\xfe", "iconv")],
    ids=["zst", "zip", "utf-16"],
)
def test_a_file_of_a_form_that_is_not_read_is_named_with_what_to_do(head, advice, tmp_path):
    (tmp_path / "a.log").write_text(marked(0) + "\n")
    (tmp_path / "b").write_bytes(head + bytes(100))
    (trouble,) = read([str(tmp_path)]).troubles
    assert (trouble.file, advice in trouble.what) == (str(tmp_path / "b"), True)


@pytest.mark.parametrize("unit", ["{", '{"a":', '{\\"', '{"schema": "refit-', f"{MARKER} ", '{"a":[', "\\", "{}"])
def test_no_line_takes_the_square_of_its_length(unit, tmp_path):
    def seconds(count):
        text = f'{MARKER} "schema" ' + unit * count
        begun = time.process_time()
        seen(tmp_path, text + "\n" + bare(0) + "\n")
        return time.process_time() - begun

    assert seconds(40_000) < 30 * seconds(5_000) + 1
