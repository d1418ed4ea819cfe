"""Every record is a line of valid JSON that its schema describes, and writing it never fails a transfer."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from mx_common import floor
from mx_common._records import INSTALLED_TYPES, TRANSFER_TYPES, plain
from mx_common.errors import ImpossibleThroughput
from mx_common.floor import WireTransfer, check
from mx_common.refit._records import record_installed
from mx_common.refit.engine import RefitJob

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
MARKERS = (floor.MARKER, floor.SLOW_MARKER, floor.IMPOSSIBLE_MARKER)
SCHEMA_OF = dict(zip(MARKERS, (floor.SCHEMA, floor.SLOW_SCHEMA, floor.IMPOSSIBLE_SCHEMA), strict=True))
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


class Lines(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        marker, text = record.getMessage().split(" ", 1)
        assert text.splitlines() == [text]
        self.found.append((record.levelno, marker, json.loads(text, parse_constant=refuse_constant)))


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not RFC 8259 JSON")


def run(transfer: WireTransfer) -> list[tuple[int, str, dict[str, Any]]]:
    """The records of one transfer through a logger of its own."""
    lines = Lines()
    with handled_by(lines) as logger, contextlib.suppress(ImpossibleThroughput):
        check(transfer, logger)
    return lines.found


@contextlib.contextmanager
def handled_by(handler: logging.Handler) -> Iterator[logging.Logger]:
    logger = logging.getLogger(f"own-{id(handler)}")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield logger
    finally:
        logger.removeHandler(handler)


def validate(record: dict[str, Any]) -> None:
    validator(record["schema"]).validate(record)


@functools.cache
def validator(name: str) -> Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no")


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


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_RESHARD_MIN_GBPS", "10")
    monkeypatch.setenv("MX_RESHARD_MAX_GBPS", "400")
    monkeypatch.setenv("MX_FLOOR_MIN_BYTES", "0")


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


class Hostile:
    """A value of a caller's type that raises whatever is asked of it."""

    def __bool__(self) -> bool:
        raise RuntimeError("no")

    __str__ = __iter__ = __len__ = __bool__

    def __repr__(self) -> str:
        return "Hostile()"


class Broken(dict[str, int]):
    """A mapping that cannot be read."""

    def items(self) -> Any:
        raise RuntimeError("no")


class Named:
    """A key that is shown as one of the record's own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name


def properties(schema: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SCHEMAS / f"{schema}.json").read_text())["properties"]
    return found


def bare(rule: Any) -> Any:
    """A rule of a schema without what it says to people."""
    if isinstance(rule, dict):
        return {key: bare(value) for key, value in rule.items() if key != "description" or not isinstance(value, str)}
    return [bare(item) for item in rule] if isinstance(rule, (list, tuple)) else rule


ANY_KIND = {"string", "integer", "number", "boolean", "object", "array", "null"}
JUDGED = {"schema", "path", "verdict", "reason", "armed", "floor", "ceiling", "wire_s", "implied_gbps"}  # the floor's own


def test_the_types_in_code_are_those_of_the_schemas() -> None:
    transfer, installed = properties(floor.SCHEMA), properties(floor.INSTALLED_SCHEMA)
    typed_keys = {
        key: bare(rule) for key, rule in transfer.items() if set(rule.get("type", ())) != ANY_KIND and key not in JUDGED
    }
    assert bare(TRANSFER_TYPES) == typed_keys
    assert bare(INSTALLED_TYPES) == {key: bare(rule) for key, rule in installed.items() if key not in JUDGED}


OWN_KEYS = sorted({key for schema in (*SCHEMA_OF.values(), floor.INSTALLED_SCHEMA) for key in properties(schema)})
strange = st.sampled_from(
    [Hostile(), Broken(a=1), Unprintable(), object(), 10**30, np.int64(3), np.bool_(True), np.zeros(3), np.float32("nan")]
)
huge = st.integers(20, 5000).map(lambda digits: 10**digits)
texts = st.text(st.characters(exclude_categories=()), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary(max_size=4) | strange | huge
inner_keys = st.sampled_from(["source", "wire_bytes", "wire_s", "exact", "whole", "install", "plan"]) | texts
near = st.recursive(  # what looks like the schemas' own values, and is not
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(inner_keys, inner, max_size=4), max_leaves=5
)
keys = st.sampled_from(OWN_KEYS) | texts | st.integers() | st.sampled_from(OWN_KEYS).map(Named) | st.none()
contexts = st.dictionaries(keys, near, max_size=4)
FIGURES = {"ok": 0.1, "slow": 10.0, "impossible": 1e-6, "unmeasured": None}


@pytest.mark.usefixtures("bounds")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(contexts)
@example({"peers": ["a"], "choice": {"exact": 1.5}, "stages_s": 3})
@example({"peers": [{"source": "w", "wire_bytes": 1}], "choice": 5, "fallback": 0})
@example({"host": np.zeros(3), "engine": [1], "framework": {}, "rank": Hostile()})
@example({Named("schema"): "mine", Named("wire_bytes"): "mine"})
def test_whatever_the_context_every_line_of_a_transfer_is_one_line_that_its_schema_describes(context: Any) -> None:
    more = {"slow": [floor.SLOW_MARKER], "impossible": [floor.IMPOSSIBLE_MARKER]}
    for kind, seconds in FIGURES.items():
        found = run(WireTransfer("load", 1 << 30, seconds, context))
        assert [marker for _, marker, _ in found] == [floor.MARKER, *more.get(kind, [])]
        for _, marker, record in found:
            validate(record)
            assert (record["schema"], record["wire_bytes"]) == (SCHEMA_OF[marker], 1 << 30)
        assert found[0][2]["verdict"] == kind


said_of_a_refit = st.fixed_dictionaries(dict.fromkeys(("engine", "rank", "world", "host", "version"), near))


@settings(deadline=None)
@given(said_of_a_refit, st.dictionaries(st.sampled_from(["install", "plan"]) | st.text(), near, max_size=3))
@example({"engine": None, "rank": None, "world": None, "host": None, "version": None}, {"install": math.nan, "plan": -1.0})
@example({"engine": "e", "rank": -1, "world": 0, "host": 5, "version": 1.5}, {})
def test_whatever_a_refit_says_its_record_of_a_served_version_is_one_that_its_schema_describes(said: Any, stages: Any) -> None:
    job = RefitJob("m", "w", **{key: value for key, value in said.items() if key != "version"})
    lines = Lines()
    with handled_by(lines) as logger:
        record_installed(job, said["version"], stages, logger)
    ((_, marker, record),) = lines.found
    assert marker == floor.INSTALLED_MARKER
    validate(record)


NO_PEERS = {"peers": None}


@pytest.mark.parametrize(
    ("given_as", "written_as"),
    [
        ({"verified": 1}, {"verified": True}),
        ({"verified": 2}, {"verified": None}),
        ({"fallback": 0}, {"fallback": False}),
        ({"peers": ["a"]}, NO_PEERS),
        ({"peers": {"a": 1}}, NO_PEERS),
        ({"peers": 5}, NO_PEERS),
        ({"peers": [{"wire_bytes": 1, "wire_s": 1.0}]}, NO_PEERS),
        (
            {"peers": [{"source": 3, "wire_bytes": 1, "more": [1]}]},
            {"peers": [{"source": "3", "wire_bytes": 1, "more": [1], "wire_s": None}]},
        ),
        ({"choice": 5}, {"choice": None}),
        ({"choice": {"exact": 1.5, "whole": 2.0, "more": 1.5}}, {"choice": {"exact": None, "whole": 2, "more": 1.5}}),
        ({"stages_s": 3}, {"stages_s": None}),
        ({"worker_id": True}, {"worker_id": None}),
        ({"worker_id": "07"}, {"worker_id": "07"}),
        ({"minimum_bytes": [1]}, {"minimum_bytes": None}),
        ({"minimum_bytes": 2**80}, {"minimum_bytes": 2.0**80}),
        ({"mine": [1, {"a": True}], "rank": [1]}, {"mine": [1, {"a": True}], "rank": [1]}),
    ],
)
def test_a_key_that_the_schema_types_is_brought_to_its_type_or_null(
    given_as: dict[str, Any], written_as: dict[str, Any]
) -> None:
    ((_, _, record),) = run(WireTransfer("load", 5, 1.0, given_as))
    assert {key: record[key] for key in written_as} == written_as
    assert [type(record[key]) for key in written_as] == [type(value) for value in written_as.values()]


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
