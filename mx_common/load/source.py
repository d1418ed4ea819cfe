"""Serves one rank's weights to other replicas.

    source = Source.start(job, loaded, ready=engine_can_serve, serving=channel, log=log)
    ...
    source.close()                      # also at exit

Registers the memory, answers manifests and leases, announces itself (INITIALIZING, READY once `ready()` holds, then heartbeats with its
load) and keeps readers' transfers moving. Invariant: the tensors it announced stay referenced until readers' leases have ended or
are revoked, and the transport is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from multiprocessing import util

from mx_common import envs, source_load
from mx_common.directory.heartbeat import SourcePublisher
from mx_common.directory.leases import Leases
from mx_common.directory.worker_service import WorkerServer, advertised_host, worker_port
from mx_common.errors import ManifestMismatch, MxError
from mx_common.load import lives
from mx_common.load.digest import tensor_digests
from mx_common.load.engine import Job
from mx_common.load.loader import Loaded
from mx_common.load.tensors import TensorTable
from mx_common.topology import local_topology
from mx_common.transport import Transport, open_transport
from mx_common.wire import p2p

__all__ = ["Source"]

LAST_READS_SECONDS = 5.0


class Source:
    """One rank as a source. Made by `start`."""

    def __init__(self, job: Job, table: TensorTable, transport: Transport, log: logging.Logger) -> None:
        self.job, self.table, self.transport, self.log = job, table, transport, log
        self.leases = Leases(envs.LEASE_SECONDS.get(), granted=transport.nudge)
        self.publisher: SourcePublisher | None = None
        self.control: WorkerServer | None = None
        self._closed = False
        self._at_exit: util.Finalize | None = None

    @classmethod
    def start(
        cls,
        job: Job,
        loaded: Loaded,
        *,
        ready: Callable[[], bool],
        serving: source_load.ServingLoad | None,
        log: logging.Logger,
    ) -> Source | None:
        """Serve what was loaded. None, after one warning, when it cannot be shared: the engine itself then serves all the same.

        `ready` says whether the engine can serve requests. `serving` is where its load is to be read; with None the source publishes
        what other providers know, and nobody says for it that its engine ends.
        """
        source = None
        transport = loaded.transport
        try:
            if job.refused:
                raise ManifestMismatch(job.refused)
            table = _published_table(job, loaded)
            transport = transport or open_transport(job.worker_id)
            if loaded.pulled is None:
                transport.register(table.regions())
            source = cls(job, table, transport, log)
            source._announce(ready, serving)
        except (MxError, ValueError, OSError) as error:
            log.warning("this replica does not serve its weights to others: %s", error)
            if source is not None:
                source.close()
            elif transport is not None:
                transport.close()
            return None
        return source

    def close(self) -> None:
        """Stop being a source: STALE, no new reads, a bounded wait for the open ones, then let the memory go. Idempotent.

        Readers that are still not done find their lease revoked, and drop what they read.
        """
        if self._closed:
            return
        self._closed = True
        if self._at_exit is not None:
            self._at_exit.cancel()
        if self.publisher is not None:
            self.publisher.stop()
        self.leases.close()
        if not self.leases.wait_idle(LAST_READS_SECONDS):
            self.log.warning("worker %s ends while %d reads are open", self.job.worker_id, self.leases.open_count())
            self.leases.revoke()
        if self.control is not None:
            self.control.stop()
        self.transport.close()
        lives.forget(self.job.worker_id)
        self.publisher = self.control = None
        self.table = TensorTable.from_torch({})

    def _announce(self, ready: Callable[[], bool], serving: source_load.ServingLoad | None) -> None:
        if 2 * envs.HEARTBEAT_SECONDS.get() > min(envs.STALE_SECONDS.get(), self.job.settings.fresh_seconds):
            self.log.warning(
                "a heartbeat every MX_HEARTBEAT_SECONDS=%g s is too rare for MX_STALE_SECONDS=%g (read by the directory) and "
                "MX_P2P_FRESH_SECONDS=%g (read by targets): one late heartbeat makes this source STALE",
                envs.HEARTBEAT_SECONDS.get(),
                envs.STALE_SECONDS.get(),
                self.job.settings.fresh_seconds,
            )
        directory = self.job.settings.directory
        host = advertised_host(directory)
        manifest = self._manifest()

        def shown() -> p2p.GetTensorManifestResponse:
            self.transport.nudge()  # whoever asks may read next, with a lease or without
            return manifest

        control = WorkerServer(shown, self.leases, self.job.worker_id, host=host, port=worker_port(self.job.rank))
        self.control = control.start()
        self.transport.serve(lambda: self.leases.open_count() > 0)
        worker = p2p.WorkerMetadata(
            worker_rank=self.job.rank,
            nixl_metadata=self.transport.metadata(),
            agent_name=self.transport.name,
            worker_grpc_endpoint=control.endpoint,
            accelerator=self.job.accelerator,
            topology=local_topology(),
        )
        instance = "" if serving is None else serving.instance

        def registered(mx_source_id: str) -> None:
            control.mx_source_id = mx_source_id
            lives.remember(lives.Life(self.job.worker_id, self.job.rank, instance, directory, mx_source_id))

        load = source_load.LoadReader(source_load.default_providers(serving, self.leases.open_count))
        self.publisher = SourcePublisher(
            self.job.identity,
            worker,
            self.job.worker_id,
            address=self.job.settings.server or None,
            ready=ready,
            read_load=load.read,
            reads_in_flight=self.leases.open_count,
            on_registered=registered,
        )
        self.publisher.start()
        # an agent that is still polled while the interpreter goes down crashes; this also runs in children of multiprocessing
        self._at_exit = util.Finalize(None, self.close, exitpriority=10)
        self.log.info(
            "holding %d tensors, %.1f MB, for readers as worker %s at %s",
            len(self.table),
            self.table.total_bytes / 1e6,
            self.job.worker_id,
            control.endpoint,
        )

    def _manifest(self) -> p2p.GetTensorManifestResponse:
        answer = p2p.GetTensorManifestResponse(
            agent_name=self.transport.name, worker_rank=self.job.rank, accelerator=self.job.accelerator, processed=True
        )
        self.table.fill(answer.tensors)
        return answer


def _published_table(job: Job, loaded: Loaded) -> TensorTable:
    """The tensors with their digests: those of the source when every one was compared with it, computed here otherwise."""
    table = TensorTable.from_torch(loaded.tensors)
    if not job.settings.verify_digest:
        return table
    if loaded.pulled is not None and loaded.pulled.verified:
        return table.with_digests_of(loaded.pulled.source)
    return table.with_digests(list(tensor_digests(table.held)))
