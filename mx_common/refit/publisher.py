"""One rank of a trainer that publishes versions of its weights.

    publisher = Publisher("org/model", "rank0", ["rank0", "rank1"], run=run)     # `run`: the same text on every rank of one start
    for step in steps:
        publisher.before_update()                # readers of the last version are done, or their time is up
        optimizer.step()
        publisher.publish(step, held)            # this rank's boxes of the global tensors: mx_common.refit.Held

The weights stay where they lie (`in_place`), or are copied aside (`snapshot`); receivers read them with one-sided reads, under leases that
the directory keeps. A version is READY when every expected slot has published. Invariant: memory that a lease holds is overwritten only
after the wait of `before_update` ran out, which is said; digests then tell the reader, or the manifest that is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import util
from typing import TYPE_CHECKING

import numpy as np

from mx_common import envs, metrics
from mx_common._spans import span
from mx_common._timed import Stages, timed
from mx_common.directory.embedded import resolve
from mx_common.directory.refit_client import RefitClient
from mx_common.directory.refit_worker import ManifestServer
from mx_common.directory.worker_service import advertised_host
from mx_common.errors import ConfigError, DirectoryUnavailable, MxError, SourceLost
from mx_common.refit.held import Held
from mx_common.refit.table import Agent, ShardTable, manifest_digest
from mx_common.transport import Regions, Transport, open_transport

if TYPE_CHECKING:
    import torch

__all__ = ["Published", "Publisher"]


@dataclass(frozen=True)
class Published:
    """What this rank published: the version, its id in the directory, bytes held, and seconds by stage."""

    version: int
    uid: str
    held_bytes: int
    seconds: dict[str, float] = field(default_factory=dict)


class Publisher:
    """One slot of a model's versions. Raises ConfigError for a slot that is not expected, and what the directory and the transport raise.

    `server`: the directory (else `MX_SERVER_ADDRESS`, else the embedded one). `mode`: `MX_PUBLISH_MODE` unless given. `run` names one
    start of the trainer: a restart that trains a version again is another run, and its versions replace those of the run before. `outage`:
    what a directory that does not answer means, `raise` or `warn`. `framework` is named in receivers' records.
    """

    def __init__(
        self,
        model_name: str,
        slot: str,
        expected_slots: Sequence[str],
        *,
        run: str = "",
        server: str = "",
        mode: str = "",
        framework: str = "",
        outage: str = "raise",
        log: logging.Logger | None = None,
        opener: Callable[[str], Transport] = open_transport,
    ) -> None:
        self.model_name, self.slot, self.slots, self.run = model_name, slot, tuple(expected_slots), run
        self.framework = framework
        self.mode = mode or envs.PUBLISH_MODE.get()
        if self.mode not in ("in_place", "snapshot"):
            raise ConfigError(f"publish mode {self.mode!r}: use in_place or snapshot")
        if outage not in ("raise", "warn"):
            raise ConfigError(f"outage={outage!r}: use raise, or warn to go on training while the directory is away")
        self._outage = outage
        if slot not in self.slots:
            raise ConfigError(f"slot {slot!r} is not among the expected slots {', '.join(self.slots) or '(none)'}")
        self._log = log or logging.getLogger(__name__)
        metrics.serve()
        self._client = RefitClient(resolve(server or None))
        self._opener = opener
        # unique on the network, and over restarts
        self.worker_id = f"{model_name}/{slot}/{os.getpid()}-{time.time_ns():x}".replace(" ", "_")
        self._transport: Transport | None = None
        self._manifests: ManifestServer | None = None
        self._registered = b""
        self._holds: Sequence[torch.Tensor] = ()
        self._copies: list[torch.Tensor] = []
        self._current = ""
        self._digested = True
        self._served: list[str] = []
        # versions that are read longer than was waited for, and their memory
        self._overdue: list[tuple[str, Sequence[torch.Tensor]]] = []
        self._closed = False
        # who forgets `close` leaves no version that nobody can read, and no agent that is polled while the interpreter goes down
        self._at_exit = util.Finalize(None, _close, args=(weakref.ref(self),), exitpriority=10)

    def publish(self, version: int, held: Sequence[Held]) -> Published:
        """Publish this rank's part of `version`; returns when the directory has it. Raises MxError; nothing is published then.

        While the directory is away, a publisher with `outage="warn"` returns a Published without uid instead."""
        if self._closed:
            raise ConfigError(f"the publisher of slot {self.slot} of {self.model_name} is closed; make another one")
        outcome = "failed"
        try:
            with span("mx.publish", model=self.model_name, version=version, slot=self.slot):
                published = self._publish(version, held)
            outcome = "published"
            return published
        except DirectoryUnavailable as error:
            if self._outage == "raise":
                raise
            what = f"version {version} of {self.model_name}, slot {self.slot}"
            self._log.error("%s was not published, training goes on: %s", what, error)
            return Published(version, "", 0)
        finally:
            metrics.PUBLISHES.add(outcome=outcome)

    def _publish(self, version: int, held: Sequence[Held]) -> Published:
        seconds = Stages()
        held = [part for part in held if part.tensor.numel()]
        with timed(seconds, "snapshot"):
            if self.mode == "snapshot":
                self._release()
                held = self._copied(held)
            elif self._current:
                self._overwritten(self._current)  # nobody called `before_update`
        if not _on_host(held):
            import torch

            torch.accelerator.synchronize()  # a reader does not wait for the optimizer's kernels, nor for the copies above
        with timed(seconds, "register"):
            transport = self._registered_transport(held)
        with timed(seconds, "digest"):
            memory = "DRAM" if _on_host(held) else "VRAM"
            agent = Agent(self.slot, transport.name, transport.metadata(), memory, self.framework)
            digested = envs.VERIFY_DIGEST.get()
            table = ShardTable.from_held(held, agent, digests=digested)
            manifest = table.encode()
        with timed(seconds, "directory"):
            uid = self._announced(version, table, manifest, tensors=len(held), digested=digested)
        for old in self._served[:-2]:
            self._manifest_server().remove(old, self.slot)
        self._served = self._served[-2:]
        published = Published(version, uid, int(table.total_bytes), seconds)
        self._log.info(
            "published version %d of %s, slot %s: %d tensors, %.1f MB (%s)",
            version,
            self.model_name,
            self.slot,
            len(held),
            published.held_bytes / 1e6,
            ", ".join(f"{stage} {taken:.3f} s" for stage, taken in seconds.items()),
        )
        return published

    def _announced(self, version: int, table: ShardTable, manifest: bytes, *, tensors: int, digested: bool) -> str:
        """Tell the directory; the version's uid. A directory that restarts between the two calls has forgotten the version: it is made once
        more. Raises DirectoryUnavailable when that is forgotten too."""
        key = f"{self.model_name}/{self.run}/{version}"
        forgot: SourceLost | None = None
        for _ in range(2):
            uid = self._client.create_version(self.model_name, version, self.slots, idempotency_key=key, run=self.run)
            server = self._manifest_server()
            if forgot is not None:
                server.remove(self._current, self.slot)
                self._served.remove(self._current)
            # from here on it may be read, whatever becomes of the answers
            self._current, self._digested = uid, digested
            server.add(uid, self.slot, manifest)
            self._served = [*(old for old in self._served if old != uid), uid]
            try:
                self._client.add_shard(
                    uid,
                    self.slot,
                    self.worker_id,
                    tensor_count=tensors,
                    total_bytes=int(table.total_bytes),
                    manifest_digest=manifest_digest(manifest),
                    manifest_endpoint=server.endpoint,
                )
            except SourceLost as error:
                forgot = error
            else:
                return uid
        raise DirectoryUnavailable(
            f"the directory {self._client.address} forgot version {version} of {self.model_name} twice before slot {self.slot} was added "
            f"({forgot}); look at why it restarts"
        ) from forgot

    def before_update(self) -> bool:
        """To be called before the optimizer overwrites what is published: no reader may start any more, and those that read are waited
        for, `MX_PUBLISH_WAIT_SECONDS` at most. Whether all were done. A snapshot needs no wait. While the directory is away nobody can say
        who reads: with `outage="warn"` that is False."""
        if self.mode == "snapshot":
            return True
        try:
            return self._release()
        except DirectoryUnavailable as error:
            if self._outage == "raise":
                raise
            self._overwritten(self._current)
            self._log.warning("nobody can say whether %s is being read while it is overwritten: %s", self.model_name, error)
            return False

    def wait_ready(self, timeout: float) -> None:
        """Until every expected slot has published the current version. Raises, naming the slots that are missing."""
        self._client.wait_ready(self._current, timeout)

    def close(self) -> None:
        """Withdraw the last version, wait for its readers (bounded), and give everything back."""
        if self._closed:
            return
        self._closed = True
        self._at_exit.cancel()
        with contextlib.ExitStack() as stack:
            stack.callback(self._client.close)
            if self._transport is not None:
                stack.callback(self._transport.close)
            if self._manifests is not None:
                stack.callback(self._manifests.stop)
            with contextlib.suppress(MxError):
                self._release()
        self._transport = self._manifests = None
        self._holds, self._copies, self._overdue = (), [], []

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _release(self) -> bool:
        """Whether nobody reads the current version any more. It stays current when the directory cannot be asked."""
        uid = self._current
        if not uid:
            return True
        self._client.delete(uid)
        self._overdue = [one for one in self._overdue if not self._client.wait_unleased(one[0], 0)]
        done = self._client.wait_unleased(uid, envs.PUBLISH_WAIT_SECONDS.get())
        self._current = ""
        if done:
            return True
        self._overdue.append((uid, self._holds))
        self._overwritten(uid)
        if not self._digested:
            # no digest would tell its readers, so their leases have to
            self._client.revoke(uid)
        self._log.warning(
            "version %s of %s is still being read after %g s (MX_PUBLISH_WAIT_SECONDS) and is overwritten now; its readers will see "
            "digests that differ, or that their lease has ended, and keep the version they serve",
            uid,
            self.model_name,
            envs.PUBLISH_WAIT_SECONDS.get(),
        )
        return False

    def _overwritten(self, uid: str) -> None:
        """Readers that compare no digests ask for the manifest once more before they use what they read."""
        if self._manifests is not None:
            self._manifests.remove(uid, self.slot)

    def _copied(self, held: Sequence[Held]) -> list[Held]:
        """The same boxes in memory of our own, allocated once for a layout."""
        if [(t.shape, t.dtype, t.device) for t in self._copies] != [
            (h.tensor.shape, h.tensor.dtype, h.tensor.device) for h in held
        ]:
            self._copies = [h.tensor.detach().clone() for h in held]
        else:
            for copy, part in zip(self._copies, held, strict=True):
                copy.copy_(part.tensor.detach())
        return [Held(h.name, h.shape, h.start, copy) for h, copy in zip(held, self._copies, strict=True)]

    def _registered_transport(self, held: Sequence[Held]) -> Transport:
        """The transport, with exactly this memory registered; registering costs, so only when an address changed. The memory of a version
        that was not withdrawn is given up only when its readers are done: a source that frees what is read dies."""
        memory = np.array([(h.tensor.data_ptr(), h.tensor.nbytes, h.tensor.device.index or 0) for h in held], dtype=np.uint64)
        memory = memory.reshape(-1, 3)
        if self._transport is None:
            self._transport = self._opener(self.worker_id)
            self._transport.serve(lambda: False)
        if memory.tobytes() != self._registered:
            self._release()
            self._registered = b""
            self._transport.deregister()
            if len(memory):
                addr, length, device = memory.T
                self._transport.register(Regions(addr, length, device, "DRAM" if _on_host(held) else "VRAM"))
            self._registered = memory.tobytes()
        self._holds = [h.tensor for h in held]
        return self._transport

    def _manifest_server(self) -> ManifestServer:
        if self._manifests is None:
            assert self._transport is not None
            self._manifests = ManifestServer(advertised_host(self._client.address), asked=self._transport.nudge).start()
        return self._manifests


def _close(publisher: weakref.ref[Publisher]) -> None:
    one = publisher()
    if one is not None:
        one.close()


def _on_host(held: Sequence[Held]) -> bool:
    kinds = sorted({h.tensor.device.type for h in held})
    if len(kinds) > 1:
        raise ConfigError(f"held tensors lie on {' and '.join(kinds)}; one rank publishes one kind of memory")
    return kinds in ([], ["cpu"])
