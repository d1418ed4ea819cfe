"""Brings an engine's rank to a version of the trainer's weights: one whole version or none.

    receiver = Receiver(RefitJob("org/model", worker_id, path="reshard", rank=rank, world=tp), engine, log)
    ready = receiver.prepare(version=7)        # leased, read, every byte covered, digests equal: nothing that serves is written yet
    ready.install()                            # when all ranks are prepared
    receiver.update()                          # both in one, for engines of one rank; the newest version

`reshard` reads exact slices into a shadow of the parameters, `staged` full tensors through bounded staging and the engine's own loader.
Both plan with the same planner and end their wire phase in `mx_common.floor.check`. Invariant: a failure before the first write to what
serves leaves the old version serving; a failure after it (only where there was no room to prepare aside) makes the engine refuse to
serve until a whole version is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from mx_common import envs, floor, metrics
from mx_common._spans import span, within
from mx_common._timed import Stages, timed
from mx_common.directory.activity_reporter import Reporter
from mx_common.directory.embedded import resolve
from mx_common.directory.refit_client import RefitClient
from mx_common.errors import MxError, RefitFailed, WeightsBroken
from mx_common.load.tensors import some_names
from mx_common.refit._counted import count_failure, count_installed
from mx_common.refit._landing import Layout
from mx_common.refit._offer import Offer, offered
from mx_common.refit._prepared import Planner
from mx_common.refit._read import Reader, Wire
from mx_common.refit._records import record_installed, refuse_impossible, transfer_of
from mx_common.refit._verify import nonfinite
from mx_common.refit.engine import RefitEngine, RefitJob
from mx_common.selection import Candidate, Target, get_configured_selector
from mx_common.transport import Transport, open_transport

__all__ = ["Installed", "Ready", "Receiver"]


@dataclass(frozen=True)
class Installed:
    """What an update did. `seconds` by stage: wait, plan, wire, verify, copy, check, land, install. `derived`: the
    engine's tensors that no published tensor fills; `unused`: published tensors that the engine does not have; `nonfinite`: tensors with
    NaN or infinity."""

    version: int
    uid: str
    path: str
    wire_bytes: int
    minimum_bytes: int
    verdict: str
    verified: bool
    seconds: Stages
    derived: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    nonfinite: tuple[str, ...] = ()


class Receiver:
    """One rank. Keeps its transports, its memory and its plan from one version to the next. Not safe to use from several threads."""

    def __init__(
        self,
        job: RefitJob,
        engine: RefitEngine,
        log: logging.Logger | None = None,
        *,
        opener: Callable[[str], Transport] = open_transport,
    ) -> None:
        metrics.serve(job.rank)
        self.job, self.engine = job, engine
        self.broken = ""
        self._log = log or logging.getLogger(__name__)
        self._client: RefitClient | None = None
        self._reporter: Reporter | None = None
        self._reader = Reader(job.worker_id, opener)
        self._planner = Planner(job, engine, self._reader.release)
        self._prepared: Ready | None = None
        self._said: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    @property
    def serving(self) -> int | None:
        """The version that the engine serves, whichever receiver installed it; None before the first."""
        return self.engine.serving

    def update(self, version: int | None = None, timeout: float | None = None) -> Installed:
        """Prepare and install `version` (None: the newest). Raises RefitFailed, saying what serves now."""
        return self.prepare(version, timeout).install()

    def prepare(self, version: int | None = None, timeout: float | None = None) -> Ready:
        """Everything but the last write. Waits at most `timeout` seconds (`MX_REFIT_WAIT_SECONDS`) for the version to be READY. What was
        prepared before and is not installed cannot be any more: this takes its memory.

        Raises RefitFailed; WeightsBroken when there was no room to prepare aside and reading failed half-way."""
        job = self.job
        who = {"model": job.model_name, "path": job.path, "engine": job.engine, "rank": job.rank, "worker_id": job.worker_id}
        with span("mx.refit", **who) as current:
            ready = self._prepare(version, timeout)
            facts = ready.facts
            current.set(version=facts.version, wire_bytes=facts.wire_bytes, verdict=facts.verdict, verified=facts.verified)
            ready.place = current.place()
            return ready

    def _prepare(self, version: int | None, timeout: float | None) -> Ready:
        seconds = Stages()
        limit = envs.REFIT_WAIT_SECONDS.get() if timeout is None else timeout
        wanted = "the newest version" if version is None else f"version {version}"
        self._prepared = None
        writing = False
        try:
            if self.job.wanted is not None and self.engine.refused:
                raise RefitFailed(f"a part cannot mend weights that are mixed ({self.engine.refused}); refit all tensors")
            with ExitStack() as stack:
                with timed(seconds, "wait"):
                    # not when it is made: of several ranks one alone may find no directory, and has to say so where all are asked
                    self._client = self._client or RefitClient(resolve(self.job.server or None))
                    self._reporter = self._reporter or Reporter(self._client.address)
                    doing = stack.enter_context(self._reporter.doing(self.job.activity(version), seconds))
                    offer = stack.enter_context(offered(self._client, self.job, version, limit))
                    stack.push(self._stopped)  # before the lease ends, which keeps what is read where it is
                    doing.of_version(offer.number, offer.uid)
                with timed(seconds, "plan"):
                    planned = self._planner.plan(offer.table, partial(_preference, offer, self.job))
                    self._reader.attach(
                        planned.layout.memory, offer.table.agents, planned.pull_staging(self.job.staging_bytes // 2)
                    )
                    doing.planned(planned.wire_bytes, planned.slots(offer.table))
                if planned.layout.writes_live:
                    stack.enter_context(self.engine.paused())
                wire = Wire(doing.reading)
                strange: list[str] = []
                for number, plan in enumerate(planned.plans):
                    landing = planned.layout.rounds[number]
                    if planned.layout.reads_live and not writing:
                        writing = self._refuse_until_whole(offer.number)
                    self._reader.run(plan, offer.table, wire, seconds, verify=planned.verified)
                    with timed(seconds, "check"):
                        strange += nonfinite(landing.tensors)
                    if planned.layout.writes_live:
                        refuse_impossible(transfer_of(self.job, offer, planned, wire, seconds), self._log)
                        writing = writing or self._refuse_until_whole(offer.number)
                    with timed(seconds, "land"):
                        landing.landed()
                with timed(seconds, "check"):
                    strange += nonfinite(planned.layout.filled)
                offer.check(planned.verified)
                verdict = floor.check(transfer_of(self.job, offer, planned, wire, seconds), self._log)
        except MxError as error:
            raise self._failed(wanted, error, writing) from error
        except Exception as error:  # whatever a trainer's records, its bytes and the engine's loader provoke
            self._log.debug("unexpected error in a refit", exc_info=True)
            raise self._failed(wanted, error, writing) from error
        except BaseException as error:  # an interrupt: reads may be under way, which only the end of the transports stops
            self._failed(wanted, error, writing)
            raise
        if strange:
            self._log.warning(
                "version %d of %s has NaN or infinity in %s", offer.number, self.job.model_name, some_names(strange)
            )
        layout = planned.layout
        done = Installed(
            offer.number,
            offer.uid,
            self.job.path,
            wire.bytes,
            planned.minimum_bytes,
            verdict.kind,
            planned.verified,
            seconds,
            layout.derived,
            layout.unused,
            tuple(strange),
        )
        self._prepared = Ready(self, layout, done)
        return self._prepared

    def close(self) -> None:
        """Give the transports and the memory back."""
        self._prepared = None
        self._reader.close()
        self._planner.forget()
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_until_whole(self, number: int) -> bool:
        """Before the first write to what serves: whatever ends this now, what serves would be mixed."""
        self.broken = (
            f"version {number} of {self.job.model_name} is written in place and was not completed; install a whole version"
        )
        self.engine.refuse(self.broken)
        return True

    def _failed(self, wanted: str, error: BaseException, writing: bool) -> RefitFailed:
        self._stopped(error)
        reason = f"{wanted} of {self.job.model_name} was not installed: {type(error).__name__}: {error}"
        if writing:
            self._mixed(reason)
        count_failure(self.job.path, error, broken=bool(self.broken or self.engine.refused))
        if not writing:
            return RefitFailed(f"{reason}; {self._serves()}")
        return WeightsBroken(f"{reason}; its weights are mixed, so it serves nothing until a whole version is installed")

    def _stopped(self, error: object, *_: object) -> None:
        """After an error nothing is read any more, and memory that may still be written into is not used again."""
        if error is not None and not self._reader.reset():
            self._planner.forget()

    def _mixed(self, reason: str) -> None:
        self.broken = reason
        self.engine.refuse(reason)

    def _serves(self) -> str:
        if self.broken or self.engine.refused:
            return "its weights are mixed since an earlier failure, so it serves nothing until a whole version is installed"
        return "the weights it was started with still serve" if self.serving is None else f"version {self.serving} still serves"


@dataclass
class Ready:
    """A version that lies beside what serves, whole and verified, until its receiver prepares another one."""

    _receiver: Receiver = field(repr=False)
    _layout: Layout = field(repr=False)
    facts: Installed
    place: object = field(default=None, repr=False)

    def install(self) -> Installed:
        """Write it, once. Raises WeightsBroken when the engine's own loader fails half-way; RefitFailed when it is installed already, or
        another version was prepared since: its memory does not hold this one any more."""
        receiver, done = self._receiver, self.facts
        wanted = f"version {done.version}"
        if receiver._prepared is not self:
            raise RefitFailed(
                f"{wanted} of {receiver.job.model_name} is not prepared any more: it was installed, or its receiver prepared another one "
                f"or was closed; prepare it again; {receiver._serves()}"
            )
        receiver._prepared = None
        try:
            with within(self.place), timed(done.seconds, "install"), receiver.engine.paused():
                try:
                    self._layout.install()
                    receiver.engine.installed(done.version)
                except BaseException as error:  # before serving goes on
                    receiver._mixed(f"{wanted} of {receiver.job.model_name} was written half: {type(error).__name__}: {error}")
                    raise
        except Exception as error:  # an engine's loader raises what it likes, and some of its writes are done
            raise receiver._failed(wanted, error, True) from error
        except BaseException as error:
            receiver._failed(wanted, error, True)
            raise
        receiver.broken = ""
        count_installed(done.path, done.version, done.seconds)
        if (done.derived, done.unused) != receiver._said:
            receiver._said = done.derived, done.unused
            if done.derived:
                receiver._log.info("no published tensor fills %s: they stay as they were made", some_names(done.derived))
            if done.unused:
                receiver._log.warning("the engine does nothing with %s, which the trainer publishes", some_names(done.unused))
        receiver._log.info(
            "version %d of %s serves: %.1f MB over the wire (%.2f x what this rank needs), %s",
            done.version,
            receiver.job.model_name,
            done.wire_bytes / 1e6,
            done.wire_bytes / max(1, done.minimum_bytes),
            ", ".join(f"{stage} {taken:.3f} s" for stage, taken in done.seconds.items()),
        )
        record_installed(receiver.job, done.version, done.seconds, receiver._log)
        return done


def _preference(offer: Offer, job: RefitJob) -> list[int]:
    """Agents in the order in which the configured selector would read from them."""
    selector = get_configured_selector()
    metrics.SELECTIONS.add(path=job.path, policy=selector.name)
    if selector.name == "random":
        return [0] * len(offer.table.agents)  # none is better than another: equal holders share the bytes
    candidates = [Candidate(offer.uid, agent.name, job.rank, job.model_name) for agent in offer.table.agents]
    ordered = selector.order(candidates, Target(job.model_name, job.worker_id, job.rank))
    place = {candidate.worker_id: at for at, candidate in enumerate(ordered)}
    return [place[agent.name] for agent in offer.table.agents]
