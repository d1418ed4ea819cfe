"""The ranks of one engine take over a version together, or none of them does.

    ranks = Ranks.of(asked, "org/model", "vllm", engine, rank, world, gather, log)      # gather: an object of every rank, in their order
    failure = ranks.prepare(version, timeout)           # on every rank; None: all are prepared
    failure = ranks.install()                           # None: all serve it

    session = Session(make_ranks, log, begin="call init once")      # the same, made anew when it is asked for with other settings

Engines report one rank's outcome for all of them, so every rank learns the same one here, and it is raised where the engine listens.
Invariant: no rank installs unless all have prepared the same version.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mx_common.errors import ConfigError, RefitFailed, WeightsBroken
from mx_common.refit.drive import Asked, Update
from mx_common.refit.engine import RefitEngine, RefitJob
from mx_common.refit.receiver import Ready, Receiver

__all__ = ["Failure", "Gather", "Ranks", "Session", "gather_over"]


@dataclass(frozen=True)
class _Said:
    """Of one rank: why it could not, or ""; whether its weights are mixed, or would be if it went on serving; what it prepared: the
    number, and the version's id, since a trainer that was restarted may publish a number again."""

    text: str
    broken: bool
    version: tuple[int, str] | None = None


@dataclass(frozen=True)
class Failure:
    """The same on every rank: what the first rank that failed said, and whether weights of any rank are mixed."""

    text: str
    broken: bool
    cause: Exception | None = field(default=None, compare=False)
    """This rank's own, if it failed too."""

    def error(self) -> RefitFailed:
        """To be raised: WeightsBroken or RefitFailed."""
        error = WeightsBroken(self.text) if self.broken else RefitFailed(self.text)
        error.__cause__ = self.cause
        return error


Gather = Callable[[_Said], list[_Said]]


def gather_over(group: Any) -> Gather:
    """Over a process group of `torch.distributed` whose ranks are the engine's, in their order."""
    from torch import distributed

    def gather(said: _Said) -> list[_Said]:
        answers = [said] * distributed.get_world_size(group)
        distributed.all_gather_object(answers, said, group=group)
        return answers

    return gather


class Ranks:
    """One rank's end. `gather` is a collective call. `asked`: the settings it was made with."""

    def __init__(self, receiver: Receiver, world: int, gather: Gather, asked: Asked) -> None:
        self.receiver, self.asked = receiver, asked
        self._world, self._gather = world, gather
        self._ready: Ready | None = None

    @classmethod
    def of(
        cls,
        asked: Asked,
        model_name: str,
        name: str,
        engine: RefitEngine,
        rank: int,
        world: int,
        gather: Gather,
        log: logging.Logger,
    ) -> Ranks:
        """`model_name`: the engine's own, where `asked` says none. `name`: the engine's kind in records."""
        job = RefitJob(
            model_name=asked.model_name or model_name,
            worker_id=uuid.uuid4().hex,
            path=asked.path,
            rank=rank,
            world=world,
            engine=name,
            server=asked.server,
            wanted=asked.wanted(),
        )
        return cls(Receiver(job, engine, log), world, gather, asked)

    @property
    def prepared(self) -> bool:
        """Whether `install` has something to install."""
        return self._ready is not None

    def forget(self) -> None:
        """What was prepared and not installed."""
        self._ready = None

    def prepare(self, version: int | None, timeout: float | None, refused: str = "") -> Failure | None:
        """Prepare `version` (None: the newest) on this rank, and hear of the others. `refused`: why this rank cannot now, or ""."""
        self._ready = ready = None
        error: Exception | None = None
        try:
            if refused:
                raise RefitFailed(refused)
            ready = self.receiver.prepare(version, timeout)
        except Exception as raised:  # the other ranks wait to hear of it, whatever it is
            error = raised
        refuses = isinstance(error, WeightsBroken) or bool(
            self.receiver.engine.refused
        )  # also one that prepared in place, with success
        answers = self._of_all(_Said(_text(error), refuses, (ready.facts.version, ready.facts.uid) if ready else None))
        failure = self._first(answers, error)
        versions = {answer.version for answer in answers}
        if failure is None and len(versions) > 1:
            found = ", ".join(f"{number} ({uid})" for number, uid in sorted(v for v in versions if v is not None))
            failure = Failure(
                f"the ranks found different versions while one was published, {found}; ask again", _any_broken(answers)
            )
        if failure is None:
            self._ready = ready
        return failure

    def install(self) -> Failure | None:
        """Write what was prepared. After a failure half-way the weights are mixed, and the rank serves nothing."""
        ready, self._ready = self._ready, None
        assert ready is not None, "nothing is prepared"
        error: Exception | None = None
        try:
            ready.install()
        except Exception as raised:  # as above
            error = raised
        return self._first(self._of_all(_Said(_text(error), error is not None)), error)

    def close(self) -> None:
        """Give the transport and the memory back."""
        self._ready = None
        self.receiver.close()

    def _of_all(self, said: _Said) -> list[_Said]:
        return [said] if self._world == 1 else self._gather(said)

    def _first(self, answers: list[_Said], error: Exception | None) -> Failure | None:
        failed = [(rank, answer) for rank, answer in enumerate(answers) if answer.text]
        if not failed:
            return None
        rank, first = failed[0]
        text = f"rank {rank}: {first.text}" if self._world > 1 else first.text
        if not first.broken and _any_broken(answers):
            mixed = ", ".join(str(rank) for rank, answer in enumerate(answers) if answer.broken)
            text += f"; but rank {mixed} was written in place, so the engine serves nothing until a whole version is installed"
        return Failure(text, _any_broken(answers), error)


class Session:
    """A rank's end from one update to the next. `make`: the ranks for settings. `begin`: what to do before the first update. `speaks`:
    whether the engine listens to this rank; the others raise nothing, and install nothing either."""

    def __init__(self, make: Callable[[Asked], Ranks], log: logging.Logger, *, begin: str, speaks: bool = True) -> None:
        self._make, self._log, self._begin, self._speaks = make, log, begin, speaks
        self._ranks: Ranks | None = None

    def init(self, asked: Asked) -> None:
        """Once, and again to change a setting; with the same settings it keeps what it has, but for a version that is prepared and not
        installed."""
        self.start()
        if self._ranks is None or self._ranks.asked != asked:
            self.close()
            self._ranks = self._make(asked)

    def start(self) -> None:
        """What an update that was never finished prepared is forgotten."""
        if self._ranks is not None:
            self._ranks.forget()

    def prepare(self, update: Update, refused: str = "") -> None:
        """`refused`: why this rank cannot take it now, which keeps all of them from it. Raises RefitFailed, WeightsBroken and, on every
        rank, ConfigError before `init`."""
        if self._ranks is None:
            raise ConfigError(f"nobody has said what this engine is to receive: {self._begin}")
        self._say(self._ranks.prepare(update.version, update.timeout, refused))

    def install(self) -> None:
        """What was prepared, if anything was. Raises WeightsBroken."""
        if self._ranks is None or not self._ranks.prepared:
            self._log.warning("the update ends with no version prepared: the weights are as they were")
            return
        self._say(self._ranks.install())

    def close(self) -> None:
        """Give the transport and the memory back; idempotent."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def _say(self, failure: Failure | None) -> None:
        if failure is not None and self._speaks:
            raise failure.error()


def _any_broken(answers: list[_Said]) -> bool:
    return any(answer.broken for answer in answers)


def _text(error: Exception | None) -> str:
    return "" if error is None else str(error) or type(error).__name__
