"""A version as full tensors, one after the other: for receivers that bring their own way of installing.

    with contextlib.closing(receive_full("org/model")) as tensors:
        for name, tensor in tensors:
            model_part[name].copy_(tensor)          # a tensor is valid until the next one is asked for

The version is leased until the last tensor was taken or the iterator is closed. Invariant: a tensor is yielded only when all its bytes
have arrived and equal what was published; memory stays within MX_STAGING_BYTES.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from mx_common import envs, floor, metrics
from mx_common._timed import Stages, timed
from mx_common.directory.activity_reporter import Reporter
from mx_common.directory.embedded import resolve
from mx_common.directory.refit_client import RefitClient
from mx_common.refit._counted import count_failure
from mx_common.refit._offer import offered
from mx_common.refit._prepared import Planner
from mx_common.refit._read import Reader, Wire
from mx_common.refit._records import refuse_impossible, transfer_of
from mx_common.refit.capture import Capture
from mx_common.refit.engine import RefitJob, TensorFacts
from mx_common.transport import open_transport

if TYPE_CHECKING:
    import torch

__all__ = ["receive_full"]

log = logging.getLogger(__name__)


def receive_full(
    model_name: str, server: str = "", version: int | None = None, *, device: str = "cpu", timeout: float | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(checkpoint name, tensor on `device`) of `version` (None: the newest), waited for `timeout` seconds (`MX_REFIT_WAIT_SECONDS`).

    Raises MxError: SourceLost when there is no such version, DigestMismatch when bytes differ, ConfigError for a tensor that staging cannot
    hold."""
    job = RefitJob(model_name, uuid.uuid4().hex, path="staged", server=server)
    metrics.serve()
    try:
        yield from _received(job, version, device, timeout)
    except Exception as error:
        count_failure(job.path, error, broken=False)
        raise


def _received(job: RefitJob, version: int | None, device: str, timeout: float | None) -> Iterator[tuple[str, torch.Tensor]]:
    limit = envs.REFIT_WAIT_SECONDS.get() if timeout is None else timeout
    seconds = Stages()
    reader = Reader(job.worker_id, open_transport)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(RefitClient(resolve(job.server or None)))
        doing = stack.enter_context(Reporter(client.address).doing(job.activity(version), seconds))
        with timed(seconds, "wait"):
            offer = stack.enter_context(offered(client, job, version, limit))
            stack.callback(reader.close)  # before the lease ends, which keeps what is read where it is
            doing.of_version(offer.number, offer.uid)
        with timed(seconds, "plan"):
            planned = Planner(job, _Nothing(device)).plan(offer.table, lambda: [0] * len(offer.table.agents))
            reader.attach(planned.layout.memory, offer.table.agents, planned.pull_staging(job.staging_bytes // 2))
            doing.planned(planned.wire_bytes, planned.slots(offer.table))
        wire = Wire(doing.reading)
        for plan, landing in zip(planned.plans, planned.layout.rounds, strict=True):
            reader.run(plan, offer.table, wire, seconds, verify=planned.verified)
            offer.check(planned.verified)
            refuse_impossible(transfer_of(job, offer, planned, wire, seconds), log)
            yield from landing.tensors.items()
        floor.check(transfer_of(job, offer, planned, wire, seconds), log)


class _Nothing:
    """The engine of whoever installs by himself: no parameters but the device they would be on."""

    refused = ""
    serving = None

    def __init__(self, device: str) -> None:
        import torch

        self._tensor = torch.empty(0, device=device)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return {"": self._tensor}

    def derived(self) -> tuple[str, ...]:
        return ()

    def capture(self, tensors: TensorFacts) -> Capture:
        return Capture((), tuple(tensors), (), {}, {}, (), {})  # all of them are taken whole

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise NotImplementedError("full tensors are yielded")

    def paused(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def installed(self, version: int) -> None:
        pass

    def refuse(self, reason: str) -> None:
        pass
