"""What a refit says of its wire phase, to the floor and to every record; and, once a version serves, of all its stages.

    floor.check(transfer_of(job, offer, planned, wire, seconds), log)
    record_installed(job, version, seconds, log)

Invariant: one schema, whichever path and whichever framework.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from mx_common import floor
from mx_common._records import INSTALLED_TYPES, emit
from mx_common.refit._offer import Offer
from mx_common.refit._prepared import Planned
from mx_common.refit._read import Wire
from mx_common.refit.engine import RefitJob
from mx_common.selection import configured_policy_label

__all__ = ["record_installed", "refuse_impossible", "transfer_of"]


def refuse_impossible(transfer: floor.WireTransfer, log: logging.Logger) -> None:
    """Raises ImpossibleThroughput, and writes the records, when what has been read so far cannot have been: before it is put to use.
    Any other verdict is that of the whole transfer, and waits for it."""
    if floor.judge(transfer, floor.configured_bounds()).kind == "impossible":
        floor.check(transfer, log)


def transfer_of(job: RefitJob, offer: Offer, planned: Planned, wire: Wire, seconds: Mapping[str, float]) -> floor.WireTransfer:
    """All reads of one version by one rank. `framework`: the trainer's; `minimum_bytes`: what the rank's layout needs; `choice`: bytes read
    exactly and as whole rows."""
    context = {
        "path": job.path,
        "engine": job.engine,
        "framework": "+".join(sorted({agent.framework for agent in offer.table.agents} - {""})) or job.framework,
        "model": job.model_name,
        "version": offer.number,
        "rank": job.rank,
        "world": job.world,
        "host": job.host,
        "step": offer.number,
        "descriptors": wire.descriptors,
        "transport": wire.transport,
        "policy": configured_policy_label(),
        "peers": wire.peers(),
        "worker_id": job.worker_id,
        "verified": planned.verified,
        "minimum_bytes": planned.minimum_bytes,
        "choice": planned.choice,
        "fallback": False,
        "stages_s": _rounded(seconds),
    }
    return floor.WireTransfer(job.path, wire.bytes, wire.seconds, context)


def record_installed(job: RefitJob, version: int, seconds: Mapping[str, float], log: logging.Logger) -> None:
    """One record of a version that serves: the transfer's own was written before anything was installed, so it lacks that stage."""
    record = {
        "schema": floor.INSTALLED_SCHEMA,
        "path": job.path,
        "engine": job.engine,
        "model": job.model_name,
        "version": version,
        "rank": job.rank,
        "world": job.world,
        "host": job.host,
        "step": version,
        "worker_id": job.worker_id,
        "stages_s": _rounded(seconds),
    }
    emit(floor.INSTALLED_MARKER, record, log, logging.INFO, INSTALLED_TYPES)


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {stage: round(taken, 6) if isinstance(taken, float) else taken for stage, taken in seconds.items()}
