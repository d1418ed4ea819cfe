"""Spans as the OpenTelemetry SDK records them, kept in memory."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@pytest.fixture
def traced(monkeypatch):
    """The spans that have ended in this test, in the order in which they began."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # a process has one provider for good; each test has its own
    monkeypatch.setattr(trace, "get_tracer", lambda name: provider.get_tracer(name))
    yield lambda: sorted(exporter.get_finished_spans(), key=lambda span: span.start_time)
    provider.shutdown()


def parents(spans):
    """Name of a span -> names of its parents, None for a root."""
    names = {span.context.span_id: span.name for span in spans}
    found = {}
    for span in spans:
        found.setdefault(span.name, set()).add(names[span.parent.span_id] if span.parent else None)
    return found
