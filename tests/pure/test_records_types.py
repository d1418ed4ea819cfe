"""Whatever a caller says, a record's keys have the types that its schema promises to readers."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mx_common import floor
from mx_common._records import INSTALLED_TYPES, TRANSFER_TYPES
from mx_common.floor import WireTransfer
from mx_common.refit._records import record_installed
from mx_common.refit.engine import RefitJob
from tests.support.record_lines import SCHEMA_OF, SCHEMAS, Lines, Unprintable, handled_by, run, validate


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
