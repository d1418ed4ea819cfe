"""Fixtures: trainers and engines in processes of their own, on one host or on two that a slow link joins."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.process import Process

MODEL = "toy/refit"
LIMIT = "400mbit"


@pytest.fixture
def child(tmp_path):
    """Starts a child; keyword arguments are its specification."""
    made = []

    def start(server, namespace="", scale=1, tls="tcp", env=None, **spec):
        own = {
            "MX_SERVER_ADDRESS": server,
            "UCX_TLS": tls,
            "TOY_REFIT_SCALE": str(scale),
            "MX_RUNTIME_DIR": str(tmp_path / "run"),
        }
        own |= {
            "MX_RECORDS_FILE": str(tmp_path / "records-{pid}.jsonl"),
            "MX_FLOOR_MIN_BYTES": "0",
            "MX_TRANSFER_STALL_TIMEOUT": "15",
            "OMP_NUM_THREADS": "1",  # threads of several processes that wait for each other's cores take longer than one alone
        }
        command = ["-m", "tests.support.refit_child", json.dumps({"model": MODEL, **spec})]
        if namespace:
            command = ["ip", "netns", "exec", namespace, sys.executable, "-u", *command]
        made.append(Process(*command, env={**own, **(env or {})}, interpreter=not namespace))
        made[-1].expect("started")
        return made[-1]

    yield start
    for one in reversed(made):
        one.end()


def told(process, command):
    process.tell(command)
    return process.expect(command.split()[0])


@pytest.fixture
def two_hosts():
    """Two network namespaces joined by a link: the trainer's, the engine's, and how to limit the link."""
    tag = f"{os.getpid() % 100000}"
    trainer, engine, near, far = f"mxrs{tag}", f"mxrr{tag}", f"mxra{tag}", f"mxrb{tag}"

    def run(command):
        subprocess.run(command.split(), check=True)

    try:
        run(f"ip netns add {trainer}")
        run(f"ip netns add {engine}")
        run(f"ip link add {near} netns {engine} type veth peer name {far} netns {trainer}")
        for namespace, device, address in ((engine, near, "10.214.0.1"), (trainer, far, "10.214.0.2")):
            run(f"ip -n {namespace} addr add {address}/30 dev {device}")
            run(f"ip -n {namespace} link set {device} up")
            run(f"ip -n {namespace} link set lo up")

        def limit(rate):
            for namespace, device in ((engine, near), (trainer, far)):
                what = (
                    f"replace dev {device} root tbf rate {rate} burst 256kb latency 100ms" if rate else f"del dev {device} root"
                )
                run(f"tc -n {namespace} qdisc {what}")

        yield trainer, engine, limit
    finally:
        for namespace in (trainer, engine):
            subprocess.run(["ip", "netns", "del", namespace], check=False)


def floor_between(limited, free):
    """A floor between the rates of some transfers over the limited link and of others without the limit, nearer to the former: what a busy
    machine slows is still above it."""
    return min(2 * max(limited), (max(limited) * min(free)) ** 0.5)


def ok_in_the_end(verdicts, after, paths):
    """Versions after ``after`` are installed until every path had an ``ok``: a busy machine can make any single one slow in truth."""
    ok = set()
    for version in range(after + 1, after + 21):
        ok |= {path for path, verdict in verdicts(version).items() if verdict == "ok"}
        if ok == set(paths):
            return
    raise AssertionError(f"with the limit off, {sorted(set(paths) - ok)} stayed slow for twenty versions")


@pytest.fixture
def being_read(two_hosts, child):
    """(trainer ranks, engine): the engine serves version 1, and reads version 2 over a link so slow that it takes some three seconds."""
    there, here, limit = two_hosts
    address = "10.214.0.2:18001"
    command = ["ip", "netns", "exec", there, sys.executable, "-m", "tests.support.refit_directory", address]
    server = Process(*command, interpreter=False)
    server.expect("serving")
    try:
        trainers = [
            child(address, there, 8, role="trainer", rank=rank, world=2, env={"MX_PUBLISH_WAIT_SECONDS": "30"})
            for rank in range(2)
        ]
        engine = child(address, here, 8, role="engine", path="reshard")
        for version in (1, 2):
            for trainer in trainers:
                told(trainer, "update")
                told(trainer, f"publish {version}")
            if version == 1:
                told(engine, "update")
        limit("40mbit")
        engine.tell("update")
        yield trainers, engine
    finally:
        server.end()
