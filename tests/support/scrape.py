"""Reads a metrics page as Prometheus does.

page = scrape(port)
page.value("mx_load_attempts_total", outcome="ok")
"""

from __future__ import annotations

import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mx_common import metrics

WAIT_SECONDS = 30


class Page:
    """The samples of one scrape. A series that is there twice fails the test."""

    def __init__(self, text):
        self.families = list(text_string_to_metric_families(text))
        self.samples = {}
        for family in self.families:
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self.samples, f"{key} is there twice"
                self.samples[key] = sample.value
        names = [family.name for family in self.families]
        assert len(set(names)) == len(names), "a family is there twice"

    def rows(self, name, **labels):
        """(labels, value) of each series of that name with those labels."""
        found = [(dict(key), value) for (n, key), value in self.samples.items() if n == name]
        return [(key, value) for key, value in found if labels.items() <= key.items()]

    def value(self, name, **labels):
        """The sum over those series."""
        return sum(value for _, value in self.rows(name, **labels))

    def processes(self):
        """Number of each process that shows something -> its rank."""
        return {labels["process"]: labels.get("rank") for labels, _ in self.rows("mx_load_attempts_total")}


def scrape(port, until=lambda page: True):
    """The page, once it is there and as wanted."""
    deadline = time.monotonic() + WAIT_SECONDS
    page = None
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                page = Page(answer.read().decode())
        except OSError:
            pass
        else:
            if until(page):
                return page
        time.sleep(0.05)
    raise AssertionError(f"the page is not as wanted: {None if page is None else page.processes()}")


@pytest.fixture
def page(monkeypatch, free_port):
    """Scrapes this process, whose numbers are all 0 before the test."""
    monkeypatch.setenv("MX_METRICS_PORT", str(free_port))
    monkeypatch.setenv("MX_METRICS_HOST", "127.0.0.1")
    metrics.TABLE.clear()
    monkeypatch.setattr(metrics, "_page", None)
    monkeypatch.setattr(metrics, "_rank", "")
    return lambda: scrape(free_port)
