"""A source says how busy it is, by whoever can tell, and never waits for whoever cannot."""

from __future__ import annotations

import http.server
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mx_common.errors import ConfigError
from mx_common.source_load import (
    LoadReader,
    NicLoad,
    PrometheusLoad,
    ReadsInFlight,
    ServingLoad,
    default_providers,
    page_load,
    serving_load,
)

PAGES = Path(__file__).parents[1] / "data" / "metrics"


class Says:
    """A provider that does what it is told."""

    def __init__(self, name: str, answer: Callable[[], float | None]) -> None:
        self.name = name
        self.read = answer


def fails() -> float:
    raise OSError("no such counter")


@pytest.mark.parametrize(
    ("answers", "published"),
    [
        ((), None),
        ((None, None), None),
        ((0.0,), 0.0),
        ((None, 0.0), 0.0),
        ((0.2, 0.7, None), 0.7),
        ((1.8,), 1.0),
        ((-1.0,), 0.0),
        ((math.nan, 0.1), 0.1),
        ((math.inf,), None),
        (("busy",), None),
    ],
)
def test_the_largest_reading_is_published_and_none_when_there_is_none(
    answers: tuple[float | None, ...], published: float | None
) -> None:
    assert LoadReader([Says(f"p{i}", lambda a=a: a) for i, a in enumerate(answers)]).read() == published


def test_a_provider_that_raises_is_no_reading_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    reader = LoadReader([Says("raising", fails), Says("good", lambda: 0.3)])
    assert reader.read() == reader.read() == 0.3
    assert caplog.text.count("raising failed: no such counter") == 1


def test_a_provider_that_hangs_is_left_out_and_not_asked_again_before_it_is_done(caplog: pytest.LogCaptureFixture) -> None:
    release, calls = threading.Event(), []

    def hang() -> float:
        calls.append(1)
        release.wait(30)
        return 0.9

    reader = LoadReader([Says("hanging", hang), Says("good", lambda: 0.3)], timeout=1.0)
    try:
        assert [reader.read() for _ in range(20)] == [0.3] * 20
        assert len(calls) == 1
        assert caplog.text.count("hanging gave no answer") == 1
    finally:
        release.set()
    deadline = time.monotonic() + 10
    while len(calls) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
        load = reader.read()
    assert load == 0.9


@pytest.mark.parametrize(
    ("running", "waiting", "slots", "cache", "load"),
    [
        (0, 0, 4, 0.0, 0.0),
        (2, 0, 4, 0.1, 0.5),
        (4, 4, 4, 0.19, 1.0),
        (1, 0, 4, 0.8, 0.8),
        (1, 0, 0, 0.3, 0.3),
        (1, 0, 4, math.nan, 0.25),
    ],
)
def test_the_serving_load_is_the_larger_of_slots_and_cache(
    running: int, waiting: int, slots: int, cache: float, load: float
) -> None:
    assert serving_load(running, waiting, slots, cache) == load


@pytest.mark.parametrize(
    ("page", "load"),
    [("vllm-0.32.0-idle.txt", 0.0), ("vllm-0.32.0-under-load.txt", 1.0), ("sglang-0.5.23-under-load.txt", 1.0)],
)
def test_real_pages_are_read(page: str, load: float) -> None:
    assert page_load((PAGES / page).read_text()) == load


def test_a_real_page_without_its_queue_shows_the_cache_usage() -> None:
    lines = (PAGES / "vllm-0.32.0-under-load.txt").read_text().splitlines()
    assert page_load("\n".join(line for line in lines if "num_requests_waiting" not in line)) == 0.19047619047619047


@pytest.mark.parametrize(
    ("page", "load"),
    [
        ("", None),
        ("up 1\n", None),
        ('vllm:kv_cache_usage_perc{model="a}b",path="C:\\\\x \\"y\\""} 0.25 1700000000000\n', 0.25),
        ('sglang:token_usage{r="0"} 0.1\nsglang:token_usage{r="1"} 0.6\nsglang:token_usage{r="2"} NaN\n', 0.6),
        ("vllm:gpu_cache_usage_perc 0.9\nvllm:kv_cache_usage_perc 0.2\n", 0.2),
        ("sglang:cache_usage 0.4\n", 0.4),
        ("dynamo_component_gpu_cache_usage_percent 0.3\n", 0.3),
        ("vllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.2\n", 0.2),
        ("vllm:num_requests_waiting 0\n", None),
        ('vllm:num_requests_waiting_by_reason{reason="deferred"} 3\nvllm:kv_cache_usage_perc 0.2\n', 0.2),
        ('sglang:num_queue_reqs{r="0"} 0\nsglang:num_queue_reqs{r="1"} 2 1700000000000\n', 1.0),
        ("vllm:kv_cache_usage_perc NaN\n", None),
    ],
)
def test_the_page_gives_one_when_requests_wait_else_the_first_usage_it_has(page: str, load: float | None) -> None:
    assert page_load(page) == load


@pytest.fixture
def page_server() -> Iterator[tuple[str, dict[str, bytes]]]:
    """A server of pages by path; `/hang` sends a header and then nothing."""
    pages: dict[str, bytes] = {}
    release = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/hang":
                self.send_response(200)
                self.end_headers()
                release.wait(30)
                return
            self.send_response(200 if self.path in pages else 404)
            self.end_headers()
            self.wfile.write(pages.get(self.path, b""))

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", pages
        release.set()
        server.shutdown()
        thread.join(10)


def test_the_engines_page_is_read_at_each_heartbeat_past_any_proxy(
    page_server: tuple[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, pages = page_server
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    reader = LoadReader([PrometheusLoad(f"{address}/metrics")], timeout=10)
    for usage in (0.25, 0.5):
        pages["/metrics"] = f"vllm:kv_cache_usage_perc {usage}\n".encode()
        assert reader.read() == usage


@pytest.mark.parametrize(
    "url", ["{address}/missing", "{address}/hang", "{address}/malformed", "{address}/bytes", "file:///etc/passwd"]
)
def test_a_page_that_is_missing_hangs_or_makes_no_sense_is_no_reading(
    page_server: tuple[str, dict[str, bytes]], url: str
) -> None:
    address, pages = page_server
    pages["/malformed"] = b'vllm:kv_cache_usage_perc{model="a 0.3\n'
    pages["/bytes"] = b"vllm:kv_cache_usage_perc \xff\n"
    assert LoadReader([PrometheusLoad(url.format(address=address), timeout=0.2)], timeout=10).read() is None


def port(
    root: Path, name: str, *, rate: str = "100 Gb/sec (4X EDR)", state: str = "4: ACTIVE", xmit: object = 0, rcv: object = 0
) -> None:
    """Write what sysfs shows of port 1 of a device."""
    counters = root / name / "ports" / "1" / "counters"
    counters.mkdir(parents=True, exist_ok=True)
    (counters.parent / "rate").write_text(f"{rate}\n")
    (counters.parent / "state").write_text(f"{state}\n")
    (counters / "port_xmit_data").write_text(f"{xmit}\n")
    (counters / "port_rcv_data").write_text(f"{rcv}\n")


GBIT_IN_WORDS = 1_000_000_000 // 8 // 4


def test_the_busier_direction_of_the_busiest_port_is_the_nic_load(tmp_path: Path) -> None:
    now = [100.0]
    nic = NicLoad(tmp_path, clock=lambda: now[0])
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1", rate="400 Gb/sec (4X NDR)")
    assert nic.read() is None
    now[0] += 2
    port(tmp_path, "mlx5_0", xmit=20 * GBIT_IN_WORDS, rcv=60 * GBIT_IN_WORDS)
    port(tmp_path, "mlx5_1", rate="400 Gb/sec (4X NDR)", xmit=80 * GBIT_IN_WORDS)
    assert nic.read() == pytest.approx(0.3)
    now[0] += 30
    assert nic.read() == 0.0


@pytest.mark.parametrize(
    "second",
    [
        {"rcv": -1},
        {"rcv": "none"},
        {"rcv": 0, "state": "1: DOWN"},
        {"rcv": 9, "rate": "fast"},
        {"rcv": 9, "rate": "0 Gb/sec"},
        {"rcv": 1},
    ],
)
def test_a_counter_that_is_odd_was_reset_or_belongs_to_a_port_that_is_down_is_no_reading(
    tmp_path: Path, second: dict[str, object]
) -> None:
    now = [100.0]
    nic = NicLoad(tmp_path, clock=lambda: now[0])
    port(tmp_path, "mlx5_0", xmit="unreadable", rcv=5)
    nic.read()
    now[0] += 1
    port(tmp_path, "mlx5_0", **{"xmit": "unreadable", **second})  # type: ignore[arg-type]
    assert nic.read() is None


def test_a_node_without_rdma_ports_has_no_nic_load(tmp_path: Path) -> None:
    nic = NicLoad(tmp_path / "absent")
    assert nic.read() is None
    assert nic.read() is None


def test_a_clock_that_stands_still_is_no_reading(tmp_path: Path) -> None:
    nic = NicLoad(tmp_path, clock=lambda: 1.0)
    port(tmp_path, "mlx5_0")
    nic.read()
    port(tmp_path, "mlx5_0", rcv=10)
    assert nic.read() is None


def test_open_leases_over_the_most_readers_are_the_load_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_SOURCE_MAX_READERS", "4")
    leases = [0]
    reader = LoadReader([ReadsInFlight(lambda: leases[0])])
    seen = []
    for leases[0] in (0, 1, 4, 9):
        seen.append(reader.read())
    assert seen == [0.0, 0.25, 1.0, 1.0]


def test_a_bad_number_of_readers_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_SOURCE_MAX_READERS", "0")
    with pytest.raises(ConfigError, match="MX_SOURCE_MAX_READERS"):
        ReadsInFlight(lambda: 0)


def test_a_source_has_the_providers_it_was_given_and_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [p.name for p in default_providers(None, None)] == ["NIC counters"]
    monkeypatch.setenv("MX_P2P_RUNTIME_METRICS_URL", "http://127.0.0.1:1/metrics")
    names = [p.name for p in default_providers(ServingLoad("instance"), lambda: 0)]
    assert names == ["NIC counters", "serving load", "metrics page", "reads in flight"]
