"""One attempt to read a model's weights out of one source.

    outcome = pull(candidate, table, job, client, transport, policy, log, reporter)  # Pulled, or Failed with the reason

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
from dataclasses import dataclass
from typing import Any

from mx_common import floor, metrics
from mx_common._spans import span
from mx_common._timed import Stages, timed
from mx_common.directory.activities import Activity
from mx_common.directory.activity_reporter import Reporter
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
from mx_common.transport import Transport, WireResult

__all__ = ["Failed", "Pulled", "pull"]


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


def pull(
    candidate: Candidate,
    target: TensorTable,
    job: Job,
    client: DirectoryClient,
    transport: Transport,
    policy: str,
    log: logging.Logger,
    reporter: Reporter,
) -> Pulled | Failed:
    """Fill `target`'s memory from `candidate`."""
    with span(
        "mx.attempt", source_worker_id=candidate.worker_id, mx_source_id=candidate.mx_source_id, policy=policy
    ) as attempt:
        seconds = Stages()
        outcome = _pull(candidate, target, job, client, transport, policy, log, reporter, seconds, attempt)
        for stage, taken in seconds.items():
            metrics.LOAD_STAGES.add(taken, stage=stage)
        return outcome


def _pull(
    candidate: Candidate,
    target: TensorTable,
    job: Job,
    client: DirectoryClient,
    transport: Transport,
    policy: str,
    log: logging.Logger,
    reporter: Reporter,
    seconds: Stages,
    attempt: span,
) -> Pulled | Failed:
    moved = False
    try:
        with reporter.doing(_activity(candidate, job), seconds) as doing:
            with _offer(candidate, job, client) as offer:
                with timed(seconds, "plan"):
                    source = TensorTable.from_descriptors(offer.tensors, target.mem)
                    reads = plan_reads(source, target)
                    check_coverage(reads, target)
                    doing.planned(reads.total_bytes, [candidate.worker_id])
                with timed(seconds, "connect"):
                    if offer.nixl_metadata:
                        peer = transport.connect(offer.nixl_metadata)
                    else:
                        peer = transport.connect_listener(offer.agent, *offer.listener, job.settings.stall_timeout)
                moved = True
                label = f"weights of {job.identity.model_name} from {candidate.worker_id}"
                with timed(seconds, "wire"), TransferProgress(label, reads.total_bytes, log, doing.reading()) as shown:
                    wire = transport.read(
                        peer,
                        reads,
                        timeout=job.settings.transfer_timeout,
                        stall_timeout=job.settings.stall_timeout,
                        progress=shown,
                    )
                transport.disconnect(peer)
                offer.check()
            with timed(seconds, "verify"):
                verified = job.settings.verify_digest and source.digested
                if job.settings.verify_digest:
                    _compare_digests(source, target)
        said = context(
            job,
            policy,
            descriptors=wire.descriptors,
            transport=wire.transport,
            peers=[{"source": candidate.worker_id, "wire_bytes": wire.wire_bytes, "wire_s": round(wire.wire_seconds, 6)}],
            source_worker_id=candidate.worker_id,
            mx_source_id=candidate.mx_source_id,
            verified=verified,
            fallback=False,
            stages_s={stage: round(taken, 6) for stage, taken in seconds.items()},
        )
        verdict = floor.check(floor.WireTransfer("load", wire.wire_bytes, wire.wire_seconds, said), log)
    except MxError as error:
        _say_failed(attempt, error)
        return Failed(f"{type(error).__name__}: {error}", moved)
    except Exception as error:  # whatever a peer's records and bytes provoke, they may cost this source and never the load
        log.debug("unexpected error in an attempt", exc_info=True)
        _say_failed(attempt, error)
        return Failed(f"unexpected {type(error).__name__}: {error}", moved)
    metrics.LOAD_ATTEMPTS.add(outcome="ok")
    attempt.set(wire_bytes=wire.wire_bytes, transport=wire.transport, verdict=verdict.kind, verified=verified)
    return Pulled(source, wire, verified, verdict, seconds)


def _say_failed(attempt: span, error: Exception) -> None:
    metrics.LOAD_ATTEMPTS.add(outcome=type(error).__name__)
    attempt.failed(error)


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
