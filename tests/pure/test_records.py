"""Every record is a line of valid JSON that its schema describes, and writing it never fails a transfer."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from mx_common import floor
from mx_common._records import plain
from mx_common.floor import WireTransfer, check
from tests.support.record_lines import MARKERS, SCHEMA_OF, SCHEMAS, Unprintable, handled_by, refuse_constant, run, validate

LISTED = {
    "host",
    "schema",
    "wire_bytes",
    "implied_gbps",
    "path",
    "step",
    "wire_s",
    "version",
    "policy",
    "verdict",
    "transport",
    "model",
    "peers",
    "descriptors",
    "engine",
    "armed",
    "floor",
    "framework",
    "rank",
    "world",
    "ceiling",
}

log = logging.getLogger("caller")


class Shown:
    def __str__(self) -> str:
        return "shown"


ODD_CONTEXT: dict[Any, Any] = {
    "schema": "mine",
    "wire_bytes": "mine",
    "wire_s": "mine",
    "implied_gbps": "mine",
    "floor_gbps": "mine",
    "shortfall_x": "mine",
    "ceiling_gbps": "mine",
    "excess_x": "mine",
    "path": "mine",
    "verdict": "mine",
    "armed": "mine",
    "floor": "mine",
    "ceiling": "mine",
    "reason": "mine",
    "rank": np.int64(3),
    "step": math.nan,
    "extra": Shown(),
    "worse": Unprintable(),
    "deep": {"a": [{"b": {1, 2}, 5: math.inf, None: b"x"}]},
    7: "a key",
    "surrogate": "\ud800",
    "huge": 10**5000,
    "verified": True,
    "fallback": False,
}


@pytest.mark.usefixtures("bounds")
@pytest.mark.parametrize(
    ("seconds", "kind"), [(0.1, "ok"), (10.0, "slow"), (1e-6, "impossible"), (0.0, "unmeasured"), (None, "unmeasured")]
)
@pytest.mark.parametrize("context", [{}, {"rank": 0, "peers": [{"source": "w", "wire_bytes": 1, "wire_s": 0.1}]}, ODD_CONTEXT])
@pytest.mark.parametrize("path", ["load", "reshard", "staged"])
def test_every_record_of_every_path_validates_and_keeps_its_own_keys(
    path: str, context: dict[Any, Any], seconds: float | None, kind: str
) -> None:
    found = run(WireTransfer(path, 1 << 30, seconds, context))
    expected = {"slow": [floor.MARKER, floor.SLOW_MARKER], "impossible": [floor.MARKER, floor.IMPOSSIBLE_MARKER]}
    assert [marker for _, marker, _ in found] == expected.get(kind, [floor.MARKER])
    for _, marker, record in found:
        validate(record)
        assert record["schema"] == SCHEMA_OF[marker]
        assert record["wire_bytes"] == 1 << 30
    always = found[0][2]
    assert (always["path"], always["verdict"], always["armed"], always["floor"], always["ceiling"]) == (
        path,
        kind,
        True,
        10.0,
        400.0,
    )


@pytest.mark.usefixtures("bounds")
def test_a_schema_refuses_a_record_that_lacks_one_of_its_keys() -> None:
    for seconds in (10.0, 1e-6):
        for _, _, record in run(WireTransfer("load", 1 << 30, seconds)):
            schema = json.loads((SCHEMAS / f"{record['schema']}.json").read_text())
            for key in schema["required"]:
                assert not Draft202012Validator(schema).is_valid({k: v for k, v in record.items() if k != key})


def test_the_record_of_every_transfer_has_every_listed_field_at_info() -> None:
    ((level, marker, record),) = run(WireTransfer("load", 5, 1.0))
    assert (level, marker) == (logging.INFO, "MX_REFIT_THROUGHPUT")
    assert set(record) >= LISTED
    assert record["host"] == socket.gethostname()
    assert (record["verdict"], record["reason"], record["engine"]) == ("unmeasured", "below_min_bytes", None)


def test_what_json_cannot_carry_is_written_as_text() -> None:
    ((_, _, record),) = run(WireTransfer("load", 5, 1.0, ODD_CONTEXT))
    assert record["rank"] == 3
    assert (record["step"], record["extra"], record["worse"]) == ("nan", "shown", "<Unprintable>")
    assert record["huge"] == "<int>"
    assert record["deep"] == {"a": [{"b": "{1, 2}", "5": "inf", "None": "b'x'"}]}
    assert (record["7"], record["surrogate"], record["verified"], record["fallback"]) == ("a key", "\ud800", True, False)


@pytest.mark.parametrize("figures", [(math.nan, 1.0), (math.inf, math.inf), (None, None), (5, math.nan)])
def test_figures_that_were_not_measured_are_written_as_null_or_text(figures: tuple[Any, Any]) -> None:
    ((_, _, record),) = run(WireTransfer("load", *figures))
    validate(record)
    assert record["wire_bytes"] in (None, "nan", "inf", 5)
    assert record["wire_s"] in (None, 1.0)
    assert record["implied_gbps"] is None


def test_a_context_that_contains_itself_ends() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = [loop]
    ((_, _, record),) = run(WireTransfer("load", 5, 1.0, loop))
    validate(record)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())) | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.sets(st.integers()),
    max_leaves=8,
)


@given(anything)
def test_any_value_becomes_valid_json(value: object) -> None:
    json.loads(json.dumps(plain(value), allow_nan=False), parse_constant=refuse_constant)


def test_no_marker_is_part_of_another() -> None:
    every = (*MARKERS, floor.INSTALLED_MARKER)
    assert [(a, b) for a in every for b in every if a != b and a in b] == []


def test_records_also_go_to_a_file_of_this_process_one_json_line_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bounds: None
) -> None:
    monkeypatch.setenv("MX_RECORDS_FILE", str(tmp_path / "new" / "records.jsonl"))
    check(WireTransfer("load", 1 << 30, 10.0, {"rank": 1}), log)
    check(WireTransfer("load", 1 << 30, 0.1, {"rank": 1}), log)
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == f"records.{os.getpid()}.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["schema"], r.get("verdict")) for r in found] == [
        (floor.SCHEMA, "slow"),
        (floor.SLOW_SCHEMA, None),
        (floor.SCHEMA, "ok"),
    ]


@pytest.mark.parametrize(
    ("pattern", "rank", "name"),
    [
        ("r-{rank}-{pid}.jsonl", 3, "r-3-{pid}.jsonl"),
        ("r-{rank}", None, "r-x.{pid}"),
        ("{rank}.jsonl", "../1", "___1.{pid}.jsonl"),
        ("{0}{", 1, "{0}{.{pid}"),
    ],
)
def test_pid_and_rank_are_filled_into_the_name_of_the_records_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pattern: str, rank: object, name: str
) -> None:
    monkeypatch.setenv("MX_RECORDS_FILE", str(tmp_path / pattern))
    check(WireTransfer("load", 1 << 30, 0.1, {"rank": rank}), log)
    assert [f.name for f in tmp_path.iterdir()] == [name.replace("{pid}", str(os.getpid()))]


class Raises(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("disk full")


def test_a_log_that_raises_stops_neither_the_transfer_nor_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MX_RECORDS_FILE", str(tmp_path / "records.jsonl"))
    with handled_by(Raises()) as logger:
        assert check(WireTransfer("load", 1 << 30, 0.1), logger).kind == "ok"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_records_file_that_cannot_be_written_stops_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / f"directory{os.getpid()}").mkdir()
    for pattern in (tmp_path / "directory{pid}", "/proc/no/such/{pid}.jsonl", "/dev/../dev/full/{pid}"):
        monkeypatch.setenv("MX_RECORDS_FILE", str(pattern))
        assert [marker for _, marker, _ in run(WireTransfer("load", 1 << 30, 0.1))] == [floor.MARKER]
