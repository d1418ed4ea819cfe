"""A whole model in an engine's worker: loaded, served to others, withdrawn before it is overwritten; and what the worker's heartbeats say.

    model = load_and_serve(job, engine, ready=EngineReady(channel), serving=channel, log=log)
    withdraw(model, log)                            # before anybody writes to it
    report = LoadReport(channel); report.load = 0.5; report.ready = True        # in the process that sees the queue

Invariant: the model that is returned is whole, and its source ends with it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing import util

from torch import nn

from mx_common.errors import MxError
from mx_common.load import lives
from mx_common.load.engine import Job
from mx_common.load.loader import load
from mx_common.load.source import Source
from mx_common.load.torch_model import TorchModel
from mx_common.source_load import ServingLoad, serving_load

__all__ = ["EngineReady", "LoadReport", "front_serves", "load_and_serve", "withdraw"]

# An engine without a front end answers no report; a served one reports within this time after warm-up, or is found READY without it.
NO_FRONT_SECONDS = 10.0
REPORT_SECONDS = 1.0

# The source each live model of this process is served by: engines make a new loader for a reload, so the model is the key.
_sources: weakref.WeakKeyDictionary[nn.Module, Source] = weakref.WeakKeyDictionary()


def load_and_serve(
    job: Job, engine: TorchModel, *, ready: Callable[[], bool], serving: ServingLoad, log: logging.Logger
) -> nn.Module:
    """Pull the weights or read them from storage, then serve them. Raises what `load` raises, after one line of its own in the log:
    engines' tracebacks bury the message."""
    try:
        loaded = load(job, engine, log)
    except MxError as error:
        log.error("%s", error)
        raise
    source = Source.start(replace(job, refused=job.refused or engine.hidden), loaded, ready=ready, serving=serving, log=log)
    model = engine.model
    assert model is not None
    if source is not None:
        _sources[model] = source
        weakref.finalize(model, source.close)  # an engine that is deleted takes its source along
    return model


def withdraw(model: nn.Module, log: logging.Logger) -> None:
    """End the source that serves `model`, if there is one."""
    source = _sources.pop(model, None)
    if source is not None:
        log.warning("this replica stops being a source: its weights are about to be replaced, and their digests would not hold")
        try:
            source.close()
        except MxError as error:  # readers compare digests: what still is open can give them nothing wrong
            log.error("this replica is no source any more, but did not close its transport: %s", error)


class EngineReady:
    """Callable: can the engine serve? Yes when its front end reports so through the channel; without one, a while after `warmed_up`."""

    def __init__(self, channel: ServingLoad) -> None:
        self._channel = channel
        self._warm_since: float | None = None
        self._served = False

    def warmed_up(self) -> None:
        """The worker can take steps."""
        self._warm_since = time.monotonic()

    def __call__(self) -> bool:
        reading = self._channel.read()
        if reading is not None and reading.ready:
            self._served = True
            return True
        if self._served:  # the front end has ended: an engine without one answers nobody, even if its processes live on
            return False
        return self._warm_since is not None and reading is None and time.monotonic() - self._warm_since > NO_FRONT_SECONDS


class LoadReport:
    """Publishes the last `load` (in [0, 1]) and `ready` every second from a thread, so that an engine that takes no steps reports a
    measured 0. When the process ends it says for its workers, which engines kill, that they are STALE. Never raises into the engine."""

    def __init__(self, channel: ServingLoad) -> None:
        self.load, self.ready = 0.0, False
        self._channel = channel
        self._stop = threading.Event()
        util.Finalize(None, self._farewell, exitpriority=10)
        threading.Thread(target=self._publish_forever, name="mx-serving-load", daemon=True).start()

    def observe(self, running: int, waiting: int, slots: int, cache: float) -> None:
        """A step has ended: requests, the most that run at once, and the share of the KV cache that is in use."""
        self.load = serving_load(running, waiting, slots, cache)

    def publish(self) -> None:
        """Now, rather than within a second."""
        with contextlib.suppress(OSError):  # telemetry: a full disk is no reading, not a fault of the engine
            self._channel.publish(self.load, self.ready)

    def _farewell(self) -> None:
        self._stop.set()
        self._channel.close()
        lives.retire(self._channel.instance)

    def _publish_forever(self) -> None:
        while not self._stop.wait(REPORT_SECONDS):
            self.publish()


# Of the engines that this process is the front end of; a later engine of it may have the same channel.
_fronts: dict[ServingLoad, LoadReport] = {}


def front_serves(channels: Iterable[ServingLoad]) -> None:
    """In an engine's front end, for engines whose load another process reports: requests are taken."""
    for channel in channels:
        report = _fronts.get(channel) or _fronts.setdefault(channel, LoadReport(channel))
        report.ready = True
        report.publish()
