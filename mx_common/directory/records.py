"""What a directory remembers of one source worker, and which records a query selects: plain values, no clock, no IO.

    select(records, Query(status=READY, model_name="m", limit=8))

Stores keep `Record`s; the identity and the worker's own metadata stay serialized, since a directory hands them out and never
looks inside. Invariant: `select` is the only place that knows the meaning and the order of a listing's filters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mx_common.wire import p2p

__all__ = ["Heartbeat", "Query", "Record", "select"]

READY = p2p.SOURCE_STATUS_READY
STALE = p2p.SOURCE_STATUS_STALE


@dataclass(frozen=True)
class Record:
    """One source worker.

    `updated_at` is in ms since the epoch by the directory's clock. `training_step` and `layout_signature` come from the
    identity's extra parameters of the same names. `source_load` None means no reading, which is not 0.0.
    """

    mx_source_id: str
    worker_id: str
    model_name: str
    worker_rank: int
    identity: bytes
    worker: bytes
    status: p2p.SourceStatus
    updated_at: int
    accelerator: str = ""
    topology: Mapping[str, str] = field(default_factory=dict)
    training_step: int | None = None
    layout_signature: str | None = None
    source_load: float | None = None
    reads_in_flight: int | None = None

    @property
    def key(self) -> tuple[str, str]:
        """What makes a record unique: `(mx_source_id, worker_id)`."""
        return (self.mx_source_id, self.worker_id)


@dataclass(frozen=True)
class Heartbeat:
    """The part of a record that a heartbeat carries; None is no reading."""

    status: p2p.SourceStatus
    source_load: float | None = None
    reads_in_flight: int | None = None


@dataclass(frozen=True)
class Query:
    """The filters of a listing; None means any. `limit` 0 means all, else at least as fresh as those left out."""

    mx_source_id: str | None = None
    status: p2p.SourceStatus | None = None
    model_name: str | None = None
    worker_rank: int | None = None
    min_training_step: int | None = None
    min_updated_at: int | None = None
    limit: int = 0

    def matches(self, record: Record) -> bool:
        """Whether every filter that is given holds. A source without a training step has none at all."""
        return (
            self.mx_source_id in (None, record.mx_source_id)
            and self.status in (None, record.status)
            and self.model_name in (None, record.model_name)
            and self.worker_rank in (None, record.worker_rank)
            and (
                self.min_training_step is None
                or (record.training_step is not None and record.training_step >= self.min_training_step)
            )
            and (self.min_updated_at is None or record.updated_at >= self.min_updated_at)
        )


def select(records: Iterable[Record], query: Query) -> list[Record]:
    """The records that match, newest first, equal ages by key; at most `query.limit` of them."""
    chosen = sorted((r for r in records if query.matches(r)), key=lambda r: (-r.updated_at, r.key))
    return chosen[: query.limit] if query.limit else chosen
