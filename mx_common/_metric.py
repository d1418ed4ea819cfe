"""What a metric is, and the numbers of this process: the table of all metrics is `mx_common.metrics`.

    table = Table()
    ATTEMPTS = table.add(Counter("mx_load_attempts_total", "attempts to read from a source", Label("outcome", ("ok", "SourceLost"))))
    ATTEMPTS.add(outcome="ok")
    table.families({"process": "0"})        # as prometheus_client takes them

The numbers are plain Python. `prometheus_client` keeps those of its own classes in files that an engine's processes share, if
PROMETHEUS_MULTIPROC_DIR is set when it is first imported: ours would show up among the engine's, and an import that comes too early
would spoil the engine's own. So it is imported only where MX_METRICS_PORT is set, when the process begins to serve.

Invariant: counting never raises, and however many values a label is given, the number of series is bounded. A forked child starts at 0.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from mx_common._once import warn_once
from mx_common.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

__all__ = ["Age", "Counter", "Gauge", "Histogram", "Label", "Metric", "Table"]

log = logging.getLogger("mx_common.metrics")

OTHER, NONE = "other", "none"
# counters of at most so many series are shown from the start, at 0: one that appears with its first event shows no increase
_SHOWN_AT_ZERO = 24
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_WORD = re.compile(r"[A-Za-z0-9_.+-]{1,40}")

Key = tuple[str, ...]


@dataclass(frozen=True)
class Label:
    """A label with its `values`; what is not among them is counted as `other`. Without values it takes words that code gives itself (an
    engine's name), the first `most` different ones. Nothing at all is `none`."""

    name: str
    values: tuple[str, ...] = ()
    most: int = 16

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"a label named {self.name!r}: use small letters, digits and _")


class Metric:
    """One row of the table. Raises ConfigError for a name that is not `mx_...`."""

    kind: ClassVar[str]

    def __init__(self, name: str, meaning: str, *labels: Label) -> None:
        if not _NAME.fullmatch(name) or not name.startswith("mx_"):
            raise ConfigError(f"a metric named {name!r}: begin with mx_, and use small letters, digits and _")
        self.name, self.meaning, self.labels = name, meaning, labels
        self._names = tuple(label.name for label in labels)
        self._seen: dict[str, set[str]] = {}
        self._series: dict[Key, Any] = {}
        self._table: Table | None = None

    @property
    def series_names(self) -> tuple[str, ...]:
        """The names of its samples."""
        return (self.name,)

    def clear(self) -> None:
        """Back to 0."""
        self._series, self._seen = {}, {}

    def snapshot(self) -> dict[Key, Any]:
        """Its series now, those included that are shown at 0."""
        return dict(self._series)

    def family(self, series: Mapping[Key, Any], more: Mapping[str, str]) -> Family:
        """As prometheus_client takes it; `more`: further labels of every sample."""
        raise NotImplementedError

    def _change(self, labels: Mapping[str, object], change: Callable[[Key], None]) -> None:
        try:
            assert self._table is not None, f"{self.name} is in no table"
            with self._table.locked():
                change(self._key(labels))
        except Exception as error:  # what was to be counted is more important than its count
            with contextlib.suppress(Exception):
                warn_once(log, ("metric", self.name), "%s is not counted: %r", self.name, error)

    def _key(self, labels: Mapping[str, object]) -> Key:
        if labels.keys() != set(self._names):
            raise ValueError(f"labels {sorted(labels)}, wanted {sorted(self._names)}")
        return tuple(self._bounded(label, labels[label.name]) for label in self.labels)

    def _bounded(self, label: Label, given: object) -> str:
        value = NONE if given is None or given == "" else str(given)
        if label.values:
            return value if value in label.values else OTHER
        seen = self._seen.setdefault(label.name, set())
        if value not in seen:
            if len(seen) >= label.most or not _WORD.fullmatch(value):
                return OTHER
            seen.add(value)
        return value


class Counter(Metric):
    """Only grows."""

    kind = "counter"

    def __init__(self, name: str, meaning: str, *labels: Label) -> None:
        if not name.endswith("_total"):
            raise ConfigError(f"a counter named {name!r}: end with _total")
        super().__init__(name, meaning, *labels)

    def add(self, amount: float | None = 1.0, /, **labels: object) -> None:
        """Count `amount`; one that is negative, not finite or None counts nothing."""

        def change(key: Key) -> None:
            if amount is not None and 0 <= amount < math.inf:
                self._series[key] = self._series.get(key, 0.0) + amount

        self._change(labels, change)

    def snapshot(self) -> dict[Key, Any]:
        choices = [label.values for label in self.labels]
        few = math.prod(map(len, choices)) <= _SHOWN_AT_ZERO
        return {**(dict.fromkeys(itertools.product(*choices), 0.0) if few else {}), **self._series}

    def family(self, series: Mapping[Key, Any], more: Mapping[str, str]) -> Family:
        from prometheus_client.metrics_core import CounterMetricFamily

        made = CounterMetricFamily(self.name, self.meaning, labels=(*self._names, *more))
        for key, value in series.items():
            made.add_metric((*key, *more.values()), value)
        return made


class Gauge(Metric):
    """A reading."""

    kind = "gauge"

    def __init__(self, name: str, meaning: str, *labels: Label) -> None:
        super().__init__(name, meaning, *labels)
        self._asked: list[Callable[[], Mapping[str, float]]] = []

    def set(self, value: float | None, /, **labels: object) -> None:
        """The reading from now on; None: there is none."""

        def change(key: Key) -> None:
            if value is None:
                self._series.pop(key, None)
            else:
                self._series[key] = value

        self._change(labels, change)

    def ask(self, answer: Callable[[], Mapping[str, float]]) -> Callable[[], None]:
        """Of a gauge with one label: whenever it is looked at, what `answer` says (value of the label -> reading) is added. Returns how
        to stop that."""
        self._asked.append(answer)
        return lambda: self._asked.remove(answer) if answer in self._asked else None

    def clear(self) -> None:
        super().clear()
        self._asked = []

    def asked(self) -> dict[Key, float]:
        """What those who were to be asked say, added up. One that raises says nothing."""
        found: dict[Key, float] = {}
        for answer in list(self._asked):
            try:
                for value, reading in answer().items():
                    key = (self._bounded(self.labels[0], value),)
                    found[key] = found.get(key, 0.0) + reading
            except Exception as error:  # a store that is away, say: then there is no reading
                log.debug("no reading of %s: %r", self.name, error)
        return found

    def family(self, series: Mapping[Key, Any], more: Mapping[str, str]) -> Family:
        from prometheus_client.metrics_core import GaugeMetricFamily

        made = GaugeMetricFamily(self.name, self.meaning, labels=(*self._names, *more))
        for key, value in series.items():
            made.add_metric((*key, *more.values()), value)
        return made


class Age(Gauge):
    """Seconds since something happened last, by this process's monotonic clock."""

    def mark(self, **labels: object) -> None:
        """It happens now."""
        self.set(time.monotonic(), **labels)

    def snapshot(self) -> dict[Key, Any]:
        now = time.monotonic()
        return {key: now - at for key, at in self._series.items()}


class Histogram(Metric):
    """Observations by size. `bounds`: upper bounds of its buckets, ascending; one without bound is added."""

    kind = "histogram"

    def __init__(self, name: str, meaning: str, *labels: Label, bounds: tuple[float, ...]) -> None:
        super().__init__(name, meaning, *labels)
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ConfigError(f"{name}: bounds {bounds}: give ascending upper bounds")
        self.bounds = bounds

    @property
    def series_names(self) -> tuple[str, ...]:
        return (f"{self.name}_bucket", f"{self.name}_count", f"{self.name}_sum")

    def observe(self, value: float | None, /, **labels: object) -> None:
        """Count one observation; one that is negative, not finite or None is none."""

        def change(key: Key) -> None:
            if value is not None and 0 <= value < math.inf:
                counts, total = self._series.get(key) or self._nothing()
                counts[bisect_left(self.bounds, value)] += 1
                self._series[key] = (counts, total + value)

        self._change(labels, change)

    def snapshot(self) -> dict[Key, Any]:
        return {key: (list(counts), total) for key, (counts, total) in self._series.items()}

    def family(self, series: Mapping[Key, Any], more: Mapping[str, str]) -> Family:
        from prometheus_client.metrics_core import HistogramMetricFamily

        made = HistogramMetricFamily(self.name, self.meaning, labels=(*self._names, *more))
        edges = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        for key, (counts, total) in series.items():
            buckets = list(zip(edges, itertools.accumulate(counts), strict=True))
            made.add_metric((*key, *more.values()), buckets=buckets, sum_value=total)
        return made

    def _nothing(self) -> tuple[list[int], float]:
        return [0] * (len(self.bounds) + 1), 0.0


M = TypeVar("M", bound=Metric)


class Table:
    """All metrics of a process by name, and the lock of their numbers."""

    def __init__(self) -> None:
        self.metrics: dict[str, Metric] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def add(self, metric: M) -> M:
        """Raises ConfigError for a second metric of one name."""
        if metric.name in self.metrics:
            raise ConfigError(f"there is a metric {metric.name} already")
        self.metrics[metric.name] = metric
        metric._table = self
        return metric

    def locked(self) -> threading.Lock:
        """The lock; in a forked child a new one, and every number is 0: what the parent counted is the parent's."""
        if self._pid != os.getpid():
            self.clear()
        return self._lock

    def clear(self) -> None:
        """Every number back to 0."""
        for metric in self.metrics.values():
            metric.clear()
        self._lock, self._pid = threading.Lock(), os.getpid()

    def families(self, more: Mapping[str, str]) -> list[Family]:
        """Every metric at this moment. `more`: labels of every sample; one without a value is left out."""
        with self.locked():
            series = {name: metric.snapshot() for name, metric in self.metrics.items()}
        for name, metric in self.metrics.items():
            if isinstance(metric, Gauge):
                series[name].update(metric.asked())
        given = {name: value for name, value in more.items() if value}
        return [metric.family(series[name], given) for name, metric in self.metrics.items()]
