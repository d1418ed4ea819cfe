"""What every record of a load says about the load itself, beside what the floor measures.

    floor.check(WireTransfer("load", wire_bytes, wire_seconds, context(job, policy, verified=True, ...)), log)

Invariant: one schema, whether a source gave the weights or storage did.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

from mx_common import floor
from mx_common.load.engine import Job

__all__ = ["context", "record_fallback"]


def context(job: Job, policy: str, **more: object) -> dict[str, object]:
    """Who loaded what, and by which policy; `more` is added."""
    return {
        "path": "load",
        "engine": job.engine,
        "framework": job.engine,
        "model": job.identity.model_name,
        "version": job.identity.revision,
        "rank": job.rank,
        "world": job.world,
        "host": socket.gethostname(),
        "step": 0,
        "policy": policy,
        "worker_id": job.worker_id,
        **more,
    }


def record_fallback(job: Job, policy: str, reasons: Sequence[str], log: logging.Logger) -> None:
    """Record that sources were there to be tried and storage had to do: a transfer that nobody measured, which is never fine."""
    nothing = {"descriptors": 0, "transport": "", "peers": [], "verified": False, "fallback": True, "tried": list(reasons)}
    floor.check(floor.WireTransfer("load", 0, 0.0, context(job, policy, **nothing)), log)
