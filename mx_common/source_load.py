"""How busy a source is: read from whatever can tell on its side, and read again in one way by every policy.

    reader = LoadReader(default_providers(serving, leases.open_count))
    reader.read()               # 0.0 ... 1.0, or None: nobody could tell. Absent is not idle; a measured 0.0 is.
    read_load(None)             # 0.5: what a policy takes for a source that did not say

Invariants: what a source publishes is the maximum over the providers that have a reading; a provider that raises, hangs or
answers nonsense is no reading and holds a heartbeat up for `PROVIDER_SECONDS` at most, once.
"""

from __future__ import annotations

import logging
import math
import numbers
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from mx_common import envs
from mx_common._nic import SYSFS, active_ports
from mx_common._once import warn_once
from mx_common._serving_channel import Reading, ServingLoad

__all__ = [
    "PROVIDER_SECONDS",
    "UNKNOWN_LOAD",
    "EngineLoad",
    "LoadReader",
    "NicLoad",
    "PrometheusLoad",
    "Provider",
    "Reading",
    "ReadsInFlight",
    "ServingLoad",
    "as_float",
    "default_providers",
    "page_load",
    "read_load",
    "read_loads",
    "serving_load",
]

log = logging.getLogger(__name__)

UNKNOWN_LOAD = 0.5
PROVIDER_SECONDS = 1.0

_USAGE = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "sglang:cache_usage",
    "dynamo_component_gpu_cache_usage_percent",
)
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_PAGE_LIMIT = 16 << 20


def read_load(value: object) -> float:
    """The load of a source as a policy takes it: absent, not finite or not a number is unknown, 0.5; else clamped to [0, 1]."""
    return float(read_loads((value,))[0])


def read_loads(values: Sequence[object]) -> npt.NDArray[np.float64]:
    """`read_load` of every value, as one column."""
    if {float, type(None)}.issuperset(map(type, values)):
        column = np.array(values, np.float64)  # None becomes NaN
    else:
        column = np.array([as_float(value) for value in values], np.float64)
    return np.clip(np.where(np.isfinite(column), column, UNKNOWN_LOAD), 0.0, 1.0)


def as_float(value: object) -> float:
    """A number as a float; NaN for anything else and for a number too large for one."""
    if not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def serving_load(running: float, waiting: float, max_num_seqs: float, kv_cache_usage: float) -> float:
    """Load of an engine with `running` and `waiting` requests on `max_num_seqs` slots: the larger of its queue's share of the
    slots and its cache usage, clamped to [0, 1]. A figure that is not finite, or slots that are not positive, do not
    count."""
    slots = (running + waiting) / max_num_seqs if max_num_seqs > 0 else 0.0
    return min(max([0.0, *(part for part in (slots, kv_cache_usage) if math.isfinite(part))]), 1.0)


class Provider(Protocol):
    """One way to tell how busy this source is."""

    @property
    def name(self) -> str:
        """Name for logs."""

    def read(self) -> float | None:
        """The load in [0, 1], or None for no reading. May raise or block; `LoadReader` bounds it."""


class EngineLoad:
    """What the engine's own adapter pushed through the host-local channel."""

    name = "serving load"

    def __init__(self, channel: ServingLoad) -> None:
        self._channel = channel

    def read(self) -> float | None:
        reading = self._channel.read()
        return None if reading is None else reading.load


class PrometheusLoad:
    """The engine's Prometheus page at an http(s) URL."""

    name = "metrics page"

    def __init__(self, url: str, timeout: float = PROVIDER_SECONDS) -> None:
        self._url = url
        self._timeout = timeout

    def read(self) -> float | None:
        if not self._url.startswith(("http://", "https://")):
            raise ValueError(f"MX_P2P_RUNTIME_METRICS_URL={self._url!a} is not an http:// or https:// address")
        # the page is this node's own: a proxy for the outside must not be asked for it
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self._url, timeout=self._timeout) as answer:
            return page_load(answer.read(_PAGE_LIMIT).decode("utf-8"))


def page_load(page: str) -> float | None:
    """Load shown by an engine's Prometheus page: 1.0 when requests wait, else its cache usage, None when the page shows
    neither. Raises ValueError for a line that is malformed."""
    from prometheus_client.parser import text_string_to_metric_families

    # only the lines that matter are parsed: a page holds a thousand others, and it is read at every heartbeat
    wanted = "\n".join(line for line in page.split("\n") if line.startswith(_USAGE + _WAITING))
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(wanted + "\n"):
        for sample in family.samples:
            if math.isfinite(sample.value):
                found[sample.name] = max(sample.value, found.get(sample.name, sample.value))
    if any(found.get(name, 0.0) > 0 for name in _WAITING):
        return 1.0
    return next((found[name] for name in _USAGE if name in found), None)


class NicLoad:
    """Utilisation of the busiest RDMA port since the previous read, in its busier direction; the first read gives none."""

    name = "NIC counters"

    def __init__(self, root: Path = SYSFS, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._before: dict[tuple[str, str], tuple[float, int]] = {}

    def read(self) -> float | None:
        directions: tuple[Literal["xmit", "rcv"], ...] = ("xmit", "rcv")
        now: dict[tuple[str, str], tuple[float, int]] = {}
        shares = []
        for port in active_ports(self._root):
            for direction in directions:
                octets = port.octets(direction)
                if octets is None:
                    continue
                key, at = (port.name, direction), self._clock()
                now[key] = (at, octets)
                then, earlier = self._before.get(key, (at, octets))
                # a counter that went back was reset: what it counted since is not known
                if at > then and octets >= earlier:
                    shares.append((octets - earlier) / (at - then) / (port.gbps * 125e6))
        self._before = now
        return max(shares, default=None)


class ReadsInFlight:
    """Open read leases over `MX_SOURCE_MAX_READERS`: the one signal that is never stale. Raises ConfigError for a bad
    setting."""

    name = "reads in flight"

    def __init__(self, open_leases: Callable[[], int], max_readers: int | None = None) -> None:
        self._open_leases = open_leases
        self._max_readers = envs.MAX_READERS.get() if max_readers is None else max_readers

    def read(self) -> float | None:
        return self._open_leases() / self._max_readers


def default_providers(serving: ServingLoad | None, open_leases: Callable[[], int] | None) -> list[Provider]:
    """The providers a source has by what it was given and by its settings. Raises ConfigError for a bad setting."""
    providers: list[Provider] = [NicLoad()]
    if serving is not None:
        providers.append(EngineLoad(serving))
    if url := envs.RUNTIME_METRICS_URL.get():
        providers.append(PrometheusLoad(url))
    if open_leases is not None:
        providers.append(ReadsInFlight(open_leases))
    return providers


class LoadReader:
    """Reads all providers at once, each on a thread, and waits `timeout` seconds for the slowest.

    A provider that is still busy then is left out, and not asked again before its thread is done: threads do not pile up, and a
    provider that hangs for good delays one read, not each.
    """

    def __init__(self, providers: Iterable[Provider], timeout: float = PROVIDER_SECONDS) -> None:
        self._providers = tuple(providers)
        self._timeout = timeout
        self._running: dict[int, threading.Thread] = {}

    def read(self) -> float | None:
        """The largest reading, in [0, 1]; None when no provider has one."""
        asked: list[tuple[int, threading.Thread, list[float]]] = []
        for index, provider in enumerate(self._providers):
            if index in self._running and self._running[index].is_alive():
                continue
            answer: list[float] = []
            thread = threading.Thread(target=_ask, args=(provider, answer), name=f"mx-load-{provider.name}", daemon=True)
            self._running[index] = thread
            asked.append((index, thread, answer))
            thread.start()
        deadline = time.monotonic() + self._timeout
        readings: list[float] = []
        for index, thread, answer in asked:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                name = self._providers[index].name
                warn_once(log, ("hangs", name), "source load: %s gave no answer in %g s; left out", name, self._timeout)
            else:
                readings += answer
        return max(readings, default=None)


def _ask(provider: Provider, answer: list[float]) -> None:
    try:
        value = provider.read()
    except Exception as error:  # a provider is telemetry, often third-party: whatever it raises is no reading
        warn_once(log, ("raises", provider.name, type(error).__name__), "source load: %s failed: %s", provider.name, error)
        return
    if value is not None and math.isfinite(value := as_float(value)):
        answer.append(min(max(value, 0.0), 1.0))
