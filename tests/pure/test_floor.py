"""The floor's verdicts: the golden vectors, the bounds, and what is impossible."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx_common import floor
from mx_common.errors import ConfigError, ImpossibleThroughput, VerificationError
from mx_common.floor import Bounds, WireTransfer, check, configured_bounds, gbps, judge

log = logging.getLogger("caller")

GIB = 1 << 30


def records(caplog: pytest.LogCaptureFixture, marker: str) -> list[dict[str, Any]]:
    lines = [r.getMessage().split(" ", 1) for r in caplog.records if r.name == "caller"]
    return [json.loads(text) for found, text in lines if found == marker]


def test_the_slow_record_of_every_golden_transfer_is_the_fleets(
    golden_floor: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("MX_FLOOR_MIN_BYTES", "0")
    monkeypatch.setenv("MX_RESHARD_MIN_GBPS", golden_floor["MX_RESHARD_MIN_GBPS"])
    figures = golden_floor["wire_bytes"], golden_floor["wire_seconds"]
    verdict = check(WireTransfer("load", *figures, golden_floor["context"]), log)
    expected = golden_floor["slow_record"]
    assert records(caplog, floor.SLOW_MARKER) == ([expected] if expected else [])
    assert (verdict.kind == "slow") == (expected is not None)
    assert len(records(caplog, floor.MARKER)) == 1


@pytest.mark.parametrize(
    ("moved", "seconds", "bounds", "kind", "reason"),
    [
        (GIB, 1.0, Bounds(), "ok", ""),
        (GIB, 1.0, Bounds(5.0), "ok", ""),
        (GIB, 1.0, Bounds(10.0), "slow", ""),
        (GIB, 8 * GIB / 10e9, Bounds(10.0, 10.0), "ok", ""),
        (GIB, 1.0, Bounds(0.0, 5.0), "impossible", ""),
        (GIB, 1.0, Bounds(10.0, 5.0), "impossible", ""),
        (1, 1e-12, Bounds(0.0, 5.0), "impossible", ""),
        (1, 1e-12, Bounds(None, 5.0), "impossible", ""),
        (GIB, 5e-324, Bounds(0.0, 5.0), "impossible", ""),
        (10**400, 1.0, Bounds(0.0, 5.0), "impossible", ""),
        ((64 << 20) - 1, 100.0, Bounds(10.0), "unmeasured", "below_min_bytes"),
        (64 << 20, 100.0, Bounds(10.0), "slow", ""),
        (GIB, 1.0, Bounds(None), "unmeasured", "no_link_rate"),
        (0, 1.0, Bounds(10.0, 5.0), "unmeasured", "no_bytes"),
        (-5, 1.0, Bounds(10.0), "unmeasured", "no_bytes"),
        (None, 1.0, Bounds(10.0), "unmeasured", "no_bytes"),
        (math.nan, 1.0, Bounds(10.0), "unmeasured", "no_bytes"),
        (math.inf, 1.0, Bounds(10.0, 5.0), "unmeasured", "no_bytes"),
        (GIB, 0, Bounds(10.0, 5.0), "unmeasured", "no_time"),
        (GIB, -1.0, Bounds(10.0), "unmeasured", "no_time"),
        (GIB, None, Bounds(10.0), "unmeasured", "no_time"),
        (GIB, math.nan, Bounds(10.0), "unmeasured", "no_time"),
        (GIB, math.inf, Bounds(10.0), "unmeasured", "no_time"),
    ],
)
def test_a_transfer_has_the_verdict_of_the_table(
    moved: Any, seconds: float | None, bounds: Bounds, kind: str, reason: str
) -> None:
    verdict = judge(WireTransfer("load", moved, seconds), bounds)
    assert (verdict.kind, verdict.reason) == (kind, reason)


numbers = st.none() | st.integers() | st.floats()
bound = st.floats(min_value=0, allow_nan=False, allow_infinity=False)


@given(numbers, numbers, st.builds(Bounds, st.none() | bound, bound, st.integers(min_value=0)))
def test_any_figures_have_a_verdict_that_their_rate_bears_out(moved: Any, seconds: Any, bounds: Bounds) -> None:
    verdict = judge(WireTransfer("load", moved, seconds), bounds)
    rate = gbps(moved, seconds)
    assert verdict.gbps == rate
    if verdict.kind == "unmeasured":
        assert verdict.reason
    else:
        assert rate is not None
        assert (verdict.kind == "impossible") == (rate > bounds.ceiling_gbps > 0)
        assert verdict.kind == "impossible" or (verdict.kind == "slow") == (rate < (bounds.floor_gbps or 0.0))


def test_armed_says_whether_a_floor_was_in_force() -> None:
    transfer = WireTransfer("load", GIB, 1.0)
    assert [judge(transfer, Bounds(f)).armed for f in (0.0, None, 1.0)] == [False, False, True]


def test_an_impossible_rate_is_recorded_and_raises_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("MX_RESHARD_MAX_GBPS", "400")
    with pytest.raises(ImpossibleThroughput, match=r"reshard on n1.*400 Gbit/s.*MX_RESHARD_MAX_GBPS") as raised:
        check(WireTransfer("reshard", 1000, 1e-9, {"rank": 3, "host": "n1"}), log)
    assert isinstance(raised.value, VerificationError)
    (record,) = records(caplog, floor.IMPOSSIBLE_MARKER)
    assert record == {
        "schema": "refit-impossible-throughput-v1",
        "rank": 3,
        "host": "n1",
        "wire_bytes": 1000,
        "wire_s": 0.0,
        "implied_gbps": 8000.0,
        "ceiling_gbps": 400.0,
        "excess_x": 20.0,
    }
    assert [r["verdict"] for r in records(caplog, floor.MARKER)] == ["impossible"]


@pytest.mark.parametrize("raw", ["-1", "nan", "inf", "fast", "1e999"])
@pytest.mark.parametrize("name", ["MX_RESHARD_MIN_GBPS", "MX_RESHARD_MAX_GBPS"])
def test_a_bound_that_makes_no_sense_is_off(monkeypatch: pytest.MonkeyPatch, name: str, raw: str) -> None:
    monkeypatch.setenv(name, raw)
    assert configured_bounds() == Bounds()


def test_a_bound_that_makes_no_sense_is_warned_about_once_with_its_value(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MX_RESHARD_MIN_GBPS", "-12.75")
    configured_bounds()
    configured_bounds()
    assert [r.getMessage().count("-12.75") for r in caplog.records] == [1]


def test_a_least_size_that_makes_no_sense_does_not_fail_a_transfer_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_FLOOR_MIN_BYTES", "some")
    assert check(WireTransfer("load", GIB, 1.0), log).kind == "ok"


def test_bounds_are_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = WireTransfer("load", GIB, 1.0)
    kinds = []
    for value in ("0", "100", "1"):
        monkeypatch.setenv("MX_RESHARD_MIN_GBPS", value)
        kinds.append(check(transfer, log).kind)
    assert kinds == ["ok", "slow", "ok"]


def sysfs(root: Path, **rates: str) -> Path:
    for name, rate in rates.items():
        directory = root / name / "ports" / "1"
        directory.mkdir(parents=True)
        (directory / "rate").write_text(f"{rate} Gb/sec (4X)\n")
        (directory / "state").write_text("1: DOWN\n" if name.startswith("down") else "4: ACTIVE\n")
    return root


@pytest.mark.parametrize(
    ("settings", "rates", "expected"),
    [
        ({}, {}, None),
        ({}, {"down0": "400"}, None),
        ({}, {"mlx5_0": "400"}, 120.0),
        ({}, {"mlx5_0": "100", "mlx5_1": "400", "down0": "800"}, 120.0),
        ({"UCX_NET_DEVICES": "mlx5_0:1"}, {"mlx5_0": "100", "mlx5_1": "400"}, 30.0),
        ({"UCX_NET_DEVICES": "eth0"}, {"mlx5_0": "100", "mlx5_1": "400"}, 120.0),
        ({"UCX_NET_DEVICES": "all"}, {"mlx5_0": "100", "mlx5_1": "400"}, 120.0),
        ({"UCX_NET_DEVICES": ""}, {"mlx5_0": "100", "mlx5_1": "400"}, 120.0),
        ({"UCX_NET_DEVICES": "down0:1"}, {"down0": "400", "mlx5_1": "100"}, None),
        ({"UCX_NET_DEVICES": "mlx5_7:1"}, {"mlx5_0": "100", "mlx5_1": "400"}, None),
        ({"UCX_NET_DEVICES": "mlx5_0:2"}, {"mlx5_0": "100"}, None),
        ({"UCX_NET_DEVICES": "down0:1,eth0"}, {"down0": "400", "mlx5_1": "100"}, None),
        ({"UCX_NET_DEVICES": "down0:1, mlx5_0:1,mlx5_1:1"}, {"down0": "800", "mlx5_0": "100", "mlx5_1": "200"}, 60.0),
        ({"UCX_NET_DEVICES": "down0:1", "MX_FLOOR_LINK_GBPS": "10"}, {"down0": "400"}, 3.0),
        ({"MX_FLOOR_AUTO_FRACTION": "0.5"}, {"mlx5_0": "400"}, 200.0),
        ({"MX_FLOOR_LINK_GBPS": "10"}, {"mlx5_0": "400"}, 3.0),
        ({"MX_FLOOR_LINK_GBPS": "10"}, {}, 3.0),
    ],
)
def test_an_automatic_floor_is_a_fraction_of_the_link(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, str], rates: dict[str, str], expected: float | None
) -> None:
    for name, value in {"MX_RESHARD_MIN_GBPS": "auto", **settings}.items():
        monkeypatch.setenv(name, value)
    assert configured_bounds(sysfs(tmp_path, **rates)).floor_gbps == (None if expected is None else pytest.approx(expected))


def test_an_automatic_floor_without_a_link_rate_is_never_fine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("MX_RESHARD_MIN_GBPS", "auto")
    verdict = check(WireTransfer("load", GIB, 1.0), log, tmp_path)
    assert (verdict.kind, verdict.reason, verdict.armed) == ("unmeasured", "no_link_rate", False)
    (record,) = records(caplog, floor.MARKER)
    assert (record["verdict"], record["reason"], record["floor"]) == ("unmeasured", "no_link_rate", None)


@pytest.mark.parametrize(
    "values", [{"floor_gbps": -1.0}, {"ceiling_gbps": math.nan}, {"min_bytes": -1}, {"floor_gbps": math.inf}]
)
def test_a_bound_that_is_no_bound_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        Bounds(**values)


@pytest.mark.parametrize(
    "values",
    [("", 1, 1.0), (None, 1, 1.0), ("load", "1", 1.0), ("load", 1, "1"), ("load", True, 1.0), ("load", 1, 1.0, ["rank"])],
)
def test_a_transfer_of_the_wrong_type_is_refused(values: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="WireTransfer"):
        WireTransfer(*values)
