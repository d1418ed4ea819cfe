"""A fleet that never was, for the picture of the dashboard: `python -m tests.support.metrics_fleet ROLE HOST RANK START`, a process each.

directory is a real one. trainer publishes a version every few seconds, and engines register, beat and ask for versions, by the real
clients. What no weights are moved for (loads, refits) is told to `mx_common.metrics` and judged by `mx_common.floor` as it would be.

    with Fleet(folder) as fleet:
        fleet.live()                    # SECONDS, since fleet.start
        fleet.ports                     # host -> port of its metrics page

The story: engine-1 loads from storage, engine-2 and engine-3 from its memory; the link of rank 1 of engine-2 is ill, so that it falls
back to storage and is slow at each refit; engine-3 refuses a version once; somebody restarts the directory.
"""

from __future__ import annotations

import logging
import math
import os
import random
import socket
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from mx_common import envs, metrics
from mx_common.directory import DirectoryServer, RefitClient, SourcePublisher
from mx_common.errors import MxError
from mx_common.floor import WireTransfer, check
from mx_common.identity import Identity
from mx_common.wire import p2p
from tests.support.process import Process

MODEL, SLOTS, WEIGHTS = "org/policy-8b", ("rank0", "rank1"), 16_060_522_496
# second of the story at which a host loads
LOADS = {"engine-1": 4, "engine-2": 14, "engine-3": 26}
FIRST_VERSION, PUBLISH_SECONDS, WRONG_VERSION = 34, 6, 9
SECONDS, RESTART, AWAY = 135, 96, 4  # of the whole story; when the directory ends, and how long it is away
HOSTS = (*LOADS, "trainer-1", "directory-1")
ILL = ("engine-2", 1)
LINK_GBPS, ILL_GBPS = 184, 41
log = logging.getLogger(__name__)


class Fleet:
    """All processes; they end with their context. `folder`: for their sockets."""

    def __init__(self, folder: Path) -> None:
        *pages, self._directory = free_ports(len(HOSTS) + 1)
        self.ports, self._folder, self._processes = dict(zip(HOSTS, pages, strict=True)), folder, ExitStack()
        self.start = time.time() + 4

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    def live(self) -> None:
        """Returns when the story is told."""
        ill = self._begin("directory", "directory-1")
        self._begin("trainer", "trainer-1")
        for host in LOADS:
            for rank in (0, 1):
                self._begin("engine", host, rank)
        time.sleep(self.start + RESTART - time.time())
        ill.end()
        time.sleep(AWAY)
        self._begin("directory", "directory-1")
        time.sleep(self.start + SECONDS - time.time())

    def _begin(self, role: str, host: str, rank: int = 0) -> Process:
        variables = {
            "MX_METRICS_PORT": self.ports[host],
            "MX_METRICS_HOST": "127.0.0.1",
            "MX_RUNTIME_DIR": self._folder / host,
            "MX_SERVER_ADDRESS": f"127.0.0.1:{self._directory}",
            "MX_HEARTBEAT_SECONDS": 1,
            "MX_RESHARD_MIN_GBPS": 100,
        }
        environment = {name: str(value) for name, value in variables.items()}
        process = Process("-m", "tests.support.metrics_fleet", role, host, rank, self.start, env=environment)
        self._processes.callback(process.end)
        return process


def free_ports(number: int) -> list[int]:
    """Ports on loopback at which nobody listens."""
    with ExitStack() as held:
        found = [held.enter_context(socket.socket()) for _ in range(number)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


class Story:
    """The clock of all processes, and the dice of this one."""

    def __init__(self, host: str, rank: int, start: float) -> None:
        self.host, self.rank, self._start = host, rank, start
        self.dice = random.Random(f"{host} {rank}")

    def now(self) -> float:
        return time.time() - self._start

    def wait(self, second: float) -> None:
        time.sleep(max(0.0, second - self.now()))

    def moved(self, path: str, weights: int) -> float:
        """One transfer is judged; the seconds that it took."""
        gbps = self.dice.gauss(ILL_GBPS if (self.host, self.rank) == ILL else LINK_GBPS, 5)
        seconds = weights * 8 / gbps / 1e9
        check(WireTransfer(path, weights, seconds, {"engine": "vllm", "framework": "fsdp"}), log)
        return seconds

    def readers(self) -> int:
        """Open reads on a source of engine-1 while the others load."""
        return sum(self.host == "engine-1" and at - 1 < self.now() < at + 3 for host, at in LOADS.items() if host != self.host)

    def load(self) -> float:
        """How busy this source is."""
        busy = 0.4 + 0.2 * math.sin(self.now() / 9 + len(self.host) * self.rank + int(self.host[-1])) + 0.15 * self.readers()
        return min(1.0, max(0.0, self.dice.gauss(busy, 0.02)))


def directory(story: Story) -> None:
    with DirectoryServer(envs.SERVER_ADDRESS.get()):
        threading.Event().wait()


def trainer(story: Story) -> None:
    metrics.serve()
    held: list[str] = []
    for number in range(1, 1000):
        story.wait(FIRST_VERSION + number * PUBLISH_SECONDS)
        try:
            with RefitClient(envs.SERVER_ADDRESS.get(), timeout=1) as client:
                if held:  # the weights change where they lie
                    client.delete(held[-1])
                    held.clear()
                held.append(client.create_version(MODEL, number, SLOTS, idempotency_key=f"{number}"))
                for slot in SLOTS:
                    time.sleep(story.dice.uniform(0.4, 0.9))
                    client.add_shard(held[-1], slot, f"trainer-{slot}", manifest_digest="d", manifest_endpoint="trainer-1:7000")
                    metrics.PUBLISHES.add(outcome="published")
        except MxError:
            for _ in SLOTS:
                metrics.PUBLISHES.add(outcome="failed")


def engine(story: Story) -> None:
    story.wait(LOADS[story.host])
    metrics.serve(story.rank)
    replicas = list(LOADS).index(story.host)
    if replicas == 0:
        _count_load("first")
    else:
        _load(story, replicas)
    identity = Identity(model_name=MODEL, backend_framework=1, dtype="bfloat16")
    worker = p2p.WorkerMetadata(worker_rank=story.rank)
    name = f"{story.host}-{story.rank}"
    with SourcePublisher(identity, worker, name, read_load=story.load, reads_in_flight=story.readers):
        serving = 0
        while True:
            time.sleep(0.4)
            try:
                with RefitClient(envs.SERVER_ADDRESS.get(), timeout=1) as client:
                    latest = client.latest(MODEL)
                if latest is not None and latest.number > serving:
                    _refit(story, latest.number)
                    serving = latest.number
            except MxError as error:
                _refit_failed(type(error).__name__)
                time.sleep(2)


def _load(story: Story, replicas: int) -> None:
    """From the sources of as many replicas; each has a source of this rank and one of the other."""
    metrics.SELECTIONS.add(path="load", policy="load_aware")
    metrics.LOAD_CANDIDATES.add(replicas, outcome="ordered")
    metrics.LOAD_CANDIDATES.add(replicas, outcome="rank")
    for stage, seconds in (("plan", 0.04), ("connect", 0.31)):
        metrics.LOAD_STAGES.add(seconds, stage=stage)
    if (story.host, story.rank) == ILL:
        metrics.LOAD_ATTEMPTS.add(outcome="TransferTimeout")
        metrics.LOAD_STAGES.add(2.5, stage="wire")
        check(WireTransfer("load", 0, None, {"engine": "vllm", "framework": "vllm"}), log)
        metrics.EVENT_AGE.mark(event="storage_fallback")
        _count_load("fallback")
        return
    if replicas > 1 and story.rank == 0:
        metrics.LOAD_ATTEMPTS.add(outcome="SourceLost")
    metrics.LOAD_STAGES.add(story.moved("load", WEIGHTS), stage="wire")
    metrics.LOAD_STAGES.add(0.22, stage="verify")
    metrics.LOAD_ATTEMPTS.add(outcome="ok")
    _count_load("source")


def _count_load(outcome: str) -> None:
    metrics.LOAD_SECONDS.observe(2.2 if outcome == "source" else 11.0, outcome=outcome)


def _refit(story: Story, number: int) -> None:
    metrics.SELECTIONS.add(path="reshard", policy="balanced")
    wire = story.moved("reshard", WEIGHTS)
    if number == WRONG_VERSION and (story.host, story.rank) == ("engine-3", 0):
        _refit_failed("DigestMismatch")
        return
    stages = {"wait": 0.05, "plan": 0.9 if number == 1 else 0.02, "wire": wire, "verify": 0.21, "check": 0.03, "install": 0.12}
    time.sleep(sum(stages.values()))
    metrics.REFITS.add(path="reshard", outcome="installed")
    metrics.REFIT_SECONDS.observe(sum(stages.values()), path="reshard")
    for stage, seconds in stages.items():
        metrics.REFIT_STAGES.add(seconds, path="reshard", stage=stage)
    metrics.SERVING_VERSION.set(number)


def _refit_failed(reason: str) -> None:
    metrics.REFITS.add(path="reshard", outcome="failed")
    metrics.REFIT_FAILURES.add(reason=reason)
    metrics.EVENT_AGE.mark(event="refit_failed")


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    role, host, rank, start = sys.argv[1:]
    threading.Thread(target=_end_with_input, daemon=True).start()
    {"directory": directory, "trainer": trainer, "engine": engine}[role](Story(host, int(rank), float(start)))
