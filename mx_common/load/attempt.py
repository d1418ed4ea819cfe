"""One attempt to read a model's weights out of one source.

    outcome = Attempt(candidate, table, job, client, transport, policy, log, reporter).pull()  # Pulled, or Failed with the reason

Manifest under a lease, plan, read, digests, floor verdict: in that order, each able to end the attempt with an error of the tree.
Invariant: the target's memory is written only after names, dtypes, sizes, layouts and coverage agree; `Failed.moved` tells
whether it may have been written.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mx_common import floor, metrics
from mx_common._spans import span
from mx_common._timed import Stages, timed
from mx_common.directory.activities import Activity
from mx_common.directory.activity_reporter import Doing, Reporter
from mx_common.directory.address import Address
from mx_common.directory.client import DirectoryClient
from mx_common.directory.worker_client import LeaseKeeper, WorkerClient
from mx_common.errors import DigestMismatch, MxError, SourceLost
from mx_common.load.digest import tensor_digests
from mx_common.load.engine import Job
from mx_common.load.matching import check_coverage, mismatched, plan_reads
from mx_common.load.progress import TransferProgress
from mx_common.load.record import context
from mx_common.load.tensors import TensorTable, some_names
from mx_common.selection import Candidate
from mx_common.transport import Reads, Transport, WireResult

__all__ = ["Attempt", "Failed", "Pulled"]


@dataclass(frozen=True)
class Failed:
    """This source did not give the weights. `moved`: the target's memory may have been written.

    A value, not an exception: a traceback would keep the model of a failed attempt in memory beside the next one.
    """

    reason: str
    moved: bool


@dataclass(frozen=True)
class Pulled:
    """What arrived: the source's table, the wire's figures, whether every tensor's digest was compared, the floor's verdict, and
    seconds by stage."""

    source: TensorTable
    wire: WireResult
    verified: bool
    verdict: floor.Verdict
    seconds: dict[str, float]


@dataclass
class Attempt:
    """One source to read, and all that reading it takes. `moved`: `target`'s memory may have been written."""

    candidate: Candidate
    target: TensorTable
    job: Job
    client: DirectoryClient
    transport: Transport
    policy: str
    log: logging.Logger
    reporter: Reporter
    moved: bool = field(default=False, init=False)

    def pull(self) -> Pulled | Failed:
        """Fill `target`'s memory from `candidate`. Once."""
        source = self.candidate
        with span(
            "mx.attempt", source_worker_id=source.worker_id, mx_source_id=source.mx_source_id, policy=self.policy
        ) as current:
            seconds = Stages()
            outcome: Pulled | Failed
            try:
                outcome = self._pull(seconds)
            except (
                Exception
            ) as error:  # whatever a peer's records and bytes provoke, they may cost this source and never the load
                if not isinstance(error, MxError):
                    self.log.debug("unexpected error in an attempt", exc_info=True)
                metrics.LOAD_ATTEMPTS.add(outcome=type(error).__name__)
                current.failed(error)
                unexpected = "" if isinstance(error, MxError) else "unexpected "
                outcome = Failed(f"{unexpected}{type(error).__name__}: {error}", self.moved)
            else:
                metrics.LOAD_ATTEMPTS.add(outcome="ok")
                wire = outcome.wire
                current.set(
                    wire_bytes=wire.wire_bytes,
                    transport=wire.transport,
                    verdict=outcome.verdict.kind,
                    verified=outcome.verified,
                )
            for stage, taken in seconds.items():
                metrics.LOAD_STAGES.add(taken, stage=stage)
            return outcome

    def _pull(self, seconds: Stages) -> Pulled:
        settings = self.job.settings
        with self.reporter.doing(_activity(self.candidate, self.job), seconds) as doing:
            with _offer(self.candidate, self.job, self.client) as offer:
                with timed(seconds, "plan"):
                    source = TensorTable.from_descriptors(offer.tensors, self.target.mem)
                    reads = plan_reads(source, self.target)
                    check_coverage(reads, self.target)
                    doing.planned(reads.total_bytes, [self.candidate.worker_id])
                wire = self._read(offer, reads, seconds, doing)
                offer.check()
            with timed(seconds, "verify"):
                verified = settings.verify_digest and source.digested
                if settings.verify_digest:
                    _compare_digests(source, self.target)
        said = context(
            self.job,
            self.policy,
            descriptors=wire.descriptors,
            transport=wire.transport,
            peers=[{"source": self.candidate.worker_id, "wire_bytes": wire.wire_bytes, "wire_s": round(wire.wire_seconds, 6)}],
            source_worker_id=self.candidate.worker_id,
            mx_source_id=self.candidate.mx_source_id,
            verified=verified,
            fallback=False,
            stages_s={stage: round(taken, 6) for stage, taken in seconds.items()},
        )
        verdict = floor.check(floor.WireTransfer("load", wire.wire_bytes, wire.wire_seconds, said), self.log)
        return Pulled(source, wire, verified, verdict, seconds)

    def _read(self, offer: _Offer, reads: Reads, seconds: Stages, doing: Doing) -> WireResult:
        settings = self.job.settings
        with timed(seconds, "connect"):
            if offer.nixl_metadata:
                peer = self.transport.connect(offer.nixl_metadata)
            else:
                peer = self.transport.connect_listener(offer.agent, *offer.listener, settings.stall_timeout)
        self.moved = True
        label = f"weights of {self.job.identity.model_name} from {self.candidate.worker_id}"
        with timed(seconds, "wire"), TransferProgress(label, reads.total_bytes, self.log, doing.reading()) as shown:
            wire = self.transport.read(
                peer, reads, timeout=settings.transfer_timeout, stall_timeout=settings.stall_timeout, progress=shown
            )
        self.transport.disconnect(peer)
        return wire


@dataclass(frozen=True)
class _Offer:
    """What a source lets a reader have: its tensors, how to connect to it, and a check that it still holds the memory."""

    tensors: Sequence[Any]
    nixl_metadata: bytes
    agent: str
    listener: tuple[str, int]
    check: Callable[[], None]


@contextlib.contextmanager
def _offer(candidate: Candidate, job: Job, client: DirectoryClient) -> Iterator[_Offer]:
    """Ask the source itself, under a lease; a source without a control service has everything in its record."""
    found = client.get_metadata(candidate.mx_source_id, candidate.worker_id)
    if found is None:
        raise SourceLost(f"the directory no longer knows worker {candidate.worker_id}; it left after it was listed")
    worker = found.worker
    if worker.worker_rank != job.rank:
        raise SourceLost(f"worker {candidate.worker_id} now serves rank {worker.worker_rank}, rank {job.rank} was asked for")
    if not worker.worker_grpc_endpoint:
        described = worker.tensor_source.tensors if worker.HasField("tensor_source") else worker.tensors
        yield _Offer(described, worker.nixl_metadata, worker.agent_name, _host_port(worker.metadata_endpoint), lambda: None)
        return
    with (
        WorkerClient(worker.worker_grpc_endpoint, candidate.mx_source_id, candidate.worker_id) as control,
        LeaseKeeper(control) as lease,
    ):
        answer = lease.manifest
        yield _Offer(
            answer.tensors,
            answer.nixl_metadata or worker.nixl_metadata,
            answer.agent_name or worker.agent_name,
            _host_port(answer.metadata_endpoint or worker.metadata_endpoint),
            lease.check,
        )


def _activity(candidate: Candidate, job: Job) -> Activity:
    return Activity(
        uuid.uuid4().hex,
        job.worker_id,
        job.identity.model_name,
        "load",
        socket.gethostname(),
        job.rank,
        job.world,
        job.engine,
        sources=(candidate.worker_id,),
    )


def _host_port(endpoint: str) -> tuple[str, int]:
    """Host and port of a listener; ("", 0) when the source names none. Raises ConfigError for garbage."""
    if not endpoint:
        return "", 0
    address = Address.parse(endpoint, what="metadata endpoint")
    return address.host, address.port


def _compare_digests(source: TensorTable, target: TensorTable) -> None:
    wrong = mismatched(source, target.names, list(tensor_digests(target.held)))
    if wrong:
        raise DigestMismatch(
            f"{len(wrong)} of {len(target)} tensors differ from what the source published ({some_names(wrong)}); it changed its weights "
            "while they were read, or the transport damaged them"
        )
