"""Loads one rank's weights: out of another replica's memory, or else from storage.

    loaded = load(job, engine, log)        # engine: see mx_common.load.engine
    source = Source.start(job, loaded, ready=..., serving=..., log=log)     # then serve others

Directory -> candidates -> up to `max_sources` attempts -> storage. Invariant: the model that is returned came whole from one place,
never two models are in memory, and memory that an aborted transfer may still write to is used again only after the transport that
wrote to it is gone.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mx_common import metrics
from mx_common._spans import span
from mx_common.directory.activity_reporter import Reporter
from mx_common.directory.client import DirectoryClient
from mx_common.directory.embedded import resolve
from mx_common.errors import LoadFailed, MxError
from mx_common.load.attempt import Attempt, Pulled
from mx_common.load.candidates import Funnel, find_sources
from mx_common.load.engine import EngineModel, Job
from mx_common.load.record import record_fallback
from mx_common.load.tensors import TensorTable
from mx_common.selection import get_selector
from mx_common.transport import Transport, open_transport

if TYPE_CHECKING:
    import torch

__all__ = ["Loaded", "load"]

# Tensors of an aborted transfer whose transport could not be destroyed: late bytes may still land in them, so they are kept for good.
_quarantine: list[Mapping[str, torch.Tensor]] = []


@dataclass(frozen=True)
class Loaded:
    """The outcome. `pulled` is None when storage gave the weights; `transport` is the one to serve from (the tensors are registered with
    it when `pulled`); `reasons` says, in order, what was tried in vain."""

    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    pulled: Pulled | None = None
    transport: Transport | None = field(default=None, repr=False)
    source_worker_id: str = ""
    reasons: tuple[str, ...] = ()


def load(job: Job, engine: EngineModel, log: logging.Logger) -> Loaded:
    """Load the weights of `job` into `engine`. Raises LoadFailed naming everything that was tried, in order."""
    metrics.serve(job.rank)
    started, outcome = time.perf_counter(), "failed"
    try:
        with span(
            "mx.load", model=job.identity.model_name, engine=job.engine, rank=job.rank, worker_id=job.worker_id
        ) as current:
            loaded, outcome = _load(job, engine, log, started)
            current.set(outcome=outcome, source_worker_id=loaded.source_worker_id)
            return loaded
    finally:
        metrics.LOAD_SECONDS.observe(time.perf_counter() - started, outcome=outcome)


def _load(job: Job, engine: EngineModel, log: logging.Logger, started: float) -> tuple[Loaded, str]:
    """What was loaded, and how that is counted."""
    reasons: list[str] = []
    spare: _Opening | None = None
    tried = False
    if job.refused:
        reasons.append(f"not shared between replicas: {job.refused}")
    else:
        spare = _Opening(f"{job.worker_id}-1")
        loaded, tried = _from_sources(job, engine, spare, log, reasons)
        if loaded is not None:
            _say_done(log, job, f"worker {loaded.source_worker_id}", started)
            return loaded, "source"
    if job.settings.fallback == "none":
        raise LoadFailed(
            f"{_tried(job, reasons)}; storage is not tried (MX_LOAD_FALLBACK=none). `mx explain {job.identity.model_name}` shows which "
            "sources there are, under which identities"
        )
    # a replica that finds no source is the first of its kind; one that found some and could not use them deserves a look
    level = logging.WARNING if tried else logging.INFO
    log.log(level, "reading %s from storage: %s", job.identity.model_name, "; ".join(reasons))
    if tried:
        metrics.EVENT_AGE.mark(event="storage_fallback")
        record_fallback(job, get_selector(job.settings.selector).name, reasons, log)
    try:
        tensors = engine.load_from_storage()
    except Exception as error:  # whatever the engine's loader raises, the user needs the whole list
        raise LoadFailed(f"{_tried(job, reasons)}; then storage: {type(error).__name__}: {error}") from error
    _say_done(log, job, "storage", started)
    outcome = "not_shared" if job.refused else "fallback" if tried else "first"
    return Loaded(tensors=tensors, transport=spare.unused() if spare else None, reasons=tuple(reasons)), outcome


class _Opening:
    """A transport that opens while the directory is asked and the model is built; loading its libraries takes longer than both."""

    def __init__(self, name: str) -> None:
        executor = ThreadPoolExecutor(1, thread_name_prefix="mx-open-transport")
        self._future: Future[Transport] | None = executor.submit(open_transport, name)
        executor.shutdown(wait=False)

    def take(self) -> Transport | None:
        """The transport, once; None when it was taken before. Raises what opening it raised."""
        future, self._future = self._future, None
        return None if future is None else future.result()

    def unused(self) -> Transport | None:
        """The transport if nobody took it and it could be opened."""
        try:
            return self.take()
        except MxError:
            return None  # whoever needs one opens it again, and reports why that fails


def _say_done(log: logging.Logger, job: Job, origin: str, started: float) -> None:
    log.info("weights of %s from %s in %.3f s", job.identity.model_name, origin, time.perf_counter() - started)


def _from_sources(
    job: Job, engine: EngineModel, spare: _Opening, log: logging.Logger, reasons: list[str]
) -> tuple[Loaded | None, bool]:
    """What a source gave, and whether there was any to try."""
    try:
        client = DirectoryClient(resolve(job.settings.server or None))
    except MxError as error:
        reasons.append(f"directory: {error}")
        return None, True
    with contextlib.closing(client):
        try:
            funnel = find_sources(client, job)
        except MxError as error:
            reasons.append(f"directory: {error}")
            return None, True
        log.info("%s", funnel.line())
        if not funnel.order:
            reasons.append(f"directory {client.address}: {funnel.why_none()}")
            return None, bool(funnel.dropped)
        return _Chain(job, engine, spare, client, log, reasons).run(funnel), True


class _Chain:
    """The attempts of one load and the little state between them: the model under construction and the transport that sees it."""

    def __init__(
        self, job: Job, engine: EngineModel, spare: _Opening, client: DirectoryClient, log: logging.Logger, reasons: list[str]
    ) -> None:
        self.job, self.engine, self.spare, self.client, self.log, self.reasons = job, engine, spare, client, log, reasons
        self.reporter = Reporter(client.address)
        self.building = False
        self.tensors: Mapping[str, torch.Tensor] | None = None
        self.table: TensorTable | None = None
        self.transport: Transport | None = None

    def run(self, funnel: Funnel) -> Loaded | None:
        for number, candidate in enumerate(funnel.order[: self.job.settings.max_sources], start=1):
            try:
                table, transport = self._ready_to_receive(number)
            except Exception as error:  # out of memory, say: storage may still do, and is asked with nothing left in memory
                self.reasons.append(f"this node: {type(error).__name__}: {error}")
                metrics.LOAD_ATTEMPTS.add(outcome="this_node")
                self.log.warning("cannot receive weights here: %s: %s", type(error).__name__, error)
                break
            attempt = Attempt(candidate, table, self.job, self.client, transport, funnel.policy, self.log, self.reporter)
            outcome = attempt.pull()
            if isinstance(outcome, Pulled):
                assert self.tensors is not None
                return Loaded(self.tensors, outcome, transport, candidate.worker_id, tuple(self.reasons))
            del table, attempt
            self.reasons.append(f"source {number}, worker {candidate.worker_id}: {outcome.reason}")
            self.log.warning("source %s did not give the weights: %s", candidate.worker_id, outcome.reason)
            if outcome.moved:
                self._reset()
        self._reset()
        return None

    def _ready_to_receive(self, number: int) -> tuple[TensorTable, Transport]:
        if self.tensors is None or self.table is None:
            self.building = True
            self.tensors = self.engine.build()
            self.table = TensorTable.from_torch(self.tensors)
        if self.transport is None:
            self.transport = self.spare.take() or open_transport(f"{self.job.worker_id}-{number}")
            self.transport.register(self.table.regions())
        return self.table, self.transport

    def _reset(self) -> None:
        """Back to no model and no transport; the transport goes first, since only its end stops late writes."""
        if self.transport is not None:
            try:
                self.transport.close()
            except MxError as error:
                self.log.error("the transport of an aborted transfer did not close (%s); its memory is kept unused", error)
                if self.tensors is not None:
                    _quarantine.append(self.tensors)
            self.transport = None
        if self.building:
            self.building = False
            self.tensors = self.table = None
            self.engine.discard()


def _tried(job: Job, reasons: list[str]) -> str:
    listed = "; ".join(f"({n}) {reason}" for n, reason in enumerate(reasons, start=1)) or "no source is listed"
    return f"no weights for {job.identity.model_name} rank {job.rank}. Tried: {listed}"
