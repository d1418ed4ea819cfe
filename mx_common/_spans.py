"""OpenTelemetry spans, where its API is installed; nothing otherwise.

    with span("mx.attempt", source_worker_id="w1") as current:
        ...
        current.set(wire_bytes=270)         # attributes mx.source_worker_id, mx.wire_bytes
        current.failed(error)               # for an error that is not raised any further

    with within(place):                     # where `place = current.place()` was: what belongs to a span that has ended

Spans go where the process sends its own; this pack sets up no exporter. Invariant: whatever a provider does, nothing is raised here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import TracebackType
from typing import Any

__all__ = ["span", "within"]


class span:
    """A context manager; an error that leaves its block is recorded on the span, which then has the status ERROR."""

    def __init__(self, name: str, **attributes: object) -> None:
        self._name, self._attributes = name, attributes
        self._open: Any = None
        self._span: Any = None

    def __enter__(self) -> span:
        api = _api()
        if api is not None:
            with contextlib.suppress(Exception):  # a provider is foreign code; see the module's invariant
                self._open = api.trace.get_tracer("mx_common").start_as_current_span(self._name)
                self._span = self._open.__enter__()
            self.set(**self._attributes)
        return self

    def set(self, **attributes: object) -> None:
        """Further attributes; those without a value are left out."""
        if self._span is not None:
            with contextlib.suppress(Exception):
                for name, value in attributes.items():
                    if value not in (None, ""):
                        self._span.set_attribute(f"mx.{name}", value if isinstance(value, (bool, int, float)) else str(value))

    def failed(self, error: BaseException) -> None:
        """Record an error that does not leave the block."""
        api = _api()
        if self._span is not None and api is not None:
            with contextlib.suppress(Exception):
                self._span.record_exception(error)
                self._span.set_status(api.trace.StatusCode.ERROR, f"{type(error).__name__}: {error}")

    def place(self) -> Any:
        """Where the block is, for `within`."""
        api = _api()
        with contextlib.suppress(Exception):
            return None if self._span is None or api is None else api.trace.set_span_in_context(self._span)
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._open is not None:
            with contextlib.suppress(Exception):
                self._open.__exit__(kind, error, trace)


@contextlib.contextmanager
def within(place: Any) -> Iterator[None]:
    """Spans of the block are children of the one that `place` is of."""
    api, token = _api(), None
    if place is not None and api is not None:
        with contextlib.suppress(Exception):
            token = api.context.attach(place)
    try:
        yield
    finally:
        if token is not None and api is not None:
            with contextlib.suppress(Exception):
                api.context.detach(token)


@functools.cache
def _api() -> Any:
    try:
        import opentelemetry.context
        import opentelemetry.trace
    except ImportError:
        return None
    return opentelemetry
