"""Trainers and engines in processes of their own, over real NIXL: kills, restarts, a slow link."""

from __future__ import annotations

import json
import signal
import sys
import time

import psutil
import pytest

from mx_common.directory import DirectoryServer
from tests.support.process import Process
from tests.support.refit_hosts import LIMIT, floor_between, ok_in_the_end, told

COPY_BYTES = 225_000  # of the toy's weights at scale 1, with whose square they grow
PATHS = pytest.mark.parametrize("path", ["reshard", "staged"])


@PATHS
@pytest.mark.parametrize("tls", ["tcp", "all"])
def test_versions_travel_between_processes_over_nixl(directory, child, path, tls):
    trainers = [child(directory.address, role="trainer", rank=rank, world=2, tls=tls) for rank in range(2)]
    engines = [child(directory.address, role="engine", path=path, rank=rank, world=2, tls=tls) for rank in range(2)]
    for version in (1, 2, 3):
        for trainer in trainers:
            assert told(trainer, "update") == "True"
            told(trainer, f"publish {version}")
        for engine in engines:
            assert json.loads(told(engine, "update"))["version"] == version
            assert told(engine, f"holds {version}") == "True"


def test_a_hundred_versions_leave_no_memory_descriptors_or_threads_behind(directory, child):
    """In the trainer's ranks and in an engine of either path; of memory, not even a tenth of a copy a version."""
    scale, allowed = 5, 10 * COPY_BYTES * 5**2
    trainers = [child(directory.address, role="trainer", rank=rank, world=2, scale=scale) for rank in range(2)]
    engines = [child(directory.address, role="engine", path=path, scale=scale) for path in ("reshard", "staged")]

    def all_told(processes, command):
        for process in processes:
            process.tell(command)
        return [process.expect(command.split()[0]) for process in processes]

    def serve(first, last):
        """Installs these versions; what each process holds then."""
        for version in range(first, last + 1):
            assert all_told(trainers, "update") == ["True", "True"]
            all_told(trainers, f"publish {version} {version % 2 + 1}")
            assert [json.loads(done)["version"] for done in all_told(engines, "update")] == [version, version]
        return [
            (process.num_fds(), process.num_threads(), process.memory_info().rss)
            for process in (psutil.Process(one.popen.pid) for one in (*trainers, *engines))
        ]

    before, after = serve(1, 10), serve(11, 100)
    assert all_told(engines, "holds 1") == ["True", "True"], "version 100 has the weights of seed 1"
    for was, now in zip(before, after, strict=True):
        assert now[0] <= was[0] + 2, (before, after)
        assert now[1] <= was[1] + 2, (before, after)
        assert now[2] <= was[2] + allowed, (before, after)


def test_a_rank_that_is_killed_while_it_is_read_leaves_the_old_version(directory, child):
    trainers = [child(directory.address, role="trainer", rank=rank, world=2, scale=12) for rank in range(2)]
    engine = child(directory.address, role="engine", path="reshard", scale=12)
    for trainer in trainers:
        told(trainer, "publish 1")
    told(engine, "update")
    for trainer in trainers:
        told(trainer, "update")
        told(trainer, "publish 2")
    trainers[1].signal(signal.SIGSTOP)  # so that the read is still going on when the kill comes
    engine.tell("update")
    time.sleep(1)
    trainers[1].signal(signal.SIGKILL)
    assert "version 1 still serve" in engine.expect("failed")
    assert told(engine, "holds 1") == "True"
    # a new start of the trainer, at other addresses and under other agent names, is followed by the same engine
    for rank in range(2):
        told(child(directory.address, role="trainer", rank=rank, world=2, scale=12, run="run-2"), "publish 3")
    assert json.loads(told(engine, "update"))["version"] == 3
    assert told(engine, "holds 3") == "True"


def test_an_engine_that_is_killed_while_it_reads_holds_the_trainer_no_longer_than_its_lease(directory, child):
    trainer = child(directory.address, role="trainer", rank=0, world=1, scale=12, env={"MX_PUBLISH_WAIT_SECONDS": "30"})
    engine = child(directory.address, role="engine", path="reshard", scale=12, env={"MX_LEASE_SECONDS": "3"})
    told(trainer, "publish 1")
    trainer.signal(signal.SIGSTOP)
    engine.tell("update")
    time.sleep(1)
    engine.signal(signal.SIGKILL)
    trainer.signal(signal.SIGCONT)
    assert told(trainer, "update") == "True"
    told(trainer, "publish 2")
    successor = child(directory.address, role="engine", path="reshard", scale=12)
    assert json.loads(told(successor, "update"))["version"] == 2
    assert told(successor, "holds 2") == "True"


def test_an_engine_that_ends_and_starts_again_catches_up_with_what_it_missed(directory, child):
    trainer = child(directory.address, role="trainer", rank=0, world=1, env={"MX_PUBLISH_WAIT_SECONDS": "5"})
    engine = child(directory.address, role="engine", path="staged")
    told(trainer, "publish 1")
    told(engine, "update")
    engine.end()
    for version in (2, 3):
        assert told(trainer, "update") == "True", "its lease is not what the trainer waits for"
        told(trainer, f"publish {version}")
    again = child(directory.address, role="engine", path="staged")
    assert told(again, "holds 3") == "False"
    assert json.loads(told(again, "update"))["version"] == 3
    assert told(again, "holds 3") == "True"


def test_a_directory_that_restarts_empty_is_filled_by_the_next_version(child):
    with DirectoryServer("127.0.0.1:0") as server:
        address = server.address
        trainer = child(address, role="trainer", rank=0, world=1)
        engine = child(address, role="engine", path="reshard", env={"MX_REFIT_WAIT_SECONDS": "3"})
        told(trainer, "publish 1")
        told(engine, "update")
    with DirectoryServer(address):
        engine.tell("update")
        assert "knows none at all" in engine.expect("failed")
        told(trainer, "update")
        told(trainer, "publish 2")
        assert json.loads(told(engine, "update"))["version"] == 2


def test_one_slow_link_gives_one_slow_record_of_one_schema_on_both_paths(two_hosts, child, tmp_path):
    there, here, limit = two_hosts
    address = "10.214.0.2:18001"
    command = ["ip", "netns", "exec", there, sys.executable, "-m", "tests.support.refit_directory", address]
    server = Process(*command, interpreter=False)
    server.expect("serving")
    try:
        trainers = [child(address, there, 8, role="trainer", rank=rank, world=2) for rank in range(2)]
        engines = {path: child(address, here, 8, role="engine", path=path) for path in ("reshard", "staged")}

        def round_of(version):
            """What each path's engine reports of the version, after it has installed it."""
            for trainer in trainers:
                told(trainer, "update")
                told(trainer, f"publish {version}")
            done = {path: json.loads(told(engine, "update")) for path, engine in engines.items()}
            print(version, {path: (d["verdict"], rate_of(d), d["seconds"]) for path, d in done.items()})
            assert all(told(engine, f"holds {version}") == "True" for engine in engines.values())
            return done

        def rate_of(done):
            return done["wire_bytes"] * 8e-9 / done["seconds"]["wire"]

        round_of(1)  # connects
        free = [rate_of(done) for done in round_of(2).values()]
        limit(LIMIT)
        limited = [rate_of(done) for done in round_of(3).values()]
        for engine in engines.values():
            told(engine, f"set MX_RESHARD_MIN_GBPS {floor_between(limited, free)}")
        assert {done["verdict"] for done in round_of(4).values()} == {"slow"}
        limit("")
        ok_in_the_end(
            lambda version: {path: done["verdict"] for path, done in round_of(version).items()}, after=4, paths=engines
        )
    finally:
        server.end()
    records = [json.loads(line) for path in tmp_path.glob("records-*") for line in path.read_text().splitlines()]
    slow = [record for record in records if record["schema"] == "refit-slow-throughput-v1" and record["version"] == 4]
    assert sorted(record["path"] for record in slow) == ["reshard", "staged"]
    assert len({tuple(sorted(record)) for record in slow}) == 1, "one schema"
    assert all(record["wire_bytes"] == slow[0]["wire_bytes"] for record in slow)


def test_a_rank_that_is_killed_while_its_bytes_travel_leaves_the_old_version(being_read):
    trainers, engine = being_read
    time.sleep(1)
    trainers[1].signal(signal.SIGKILL)
    assert "version 1 still serves" in engine.expect("failed")
    assert told(engine, "holds 1") == "True"


def test_an_optimizer_that_steps_while_bytes_travel_is_told_by_digests(being_read):
    trainers, engine = being_read
    time.sleep(1)
    for trainer in trainers:
        told(trainer, "overwrite 9")
    assert "DigestMismatch" in (said := engine.expect("failed"))
    assert "version 1 still serves" in said
    assert told(engine, "holds 1") == "True"


def test_a_trainer_that_would_step_while_bytes_travel_waits_for_its_reader(being_read):
    trainers, engine = being_read
    time.sleep(1)
    assert [told(trainer, "update") for trainer in trainers] == ["True", "True"]
    assert json.loads(engine.expect("update"))["version"] == 2
    assert told(engine, "holds 2") == "True"
