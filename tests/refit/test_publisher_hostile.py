"""What is done to publishers that their documentation does not ask for: nothing is freed or overwritten unsaid while it is read."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest

from mx_common.directory import DirectoryServer
from mx_common.directory.refit_client import RefitClient
from mx_common.errors import ConfigError, DirectoryUnavailable, MxError, RefitFailed, SourceLost
from mx_common.refit.publisher import Publisher
from mx_common.transport.local import LocalTransport
from tests.refit.test_refit_hostile import MODEL, holds, whole
from tests.support.refit_toy import checkpoint


@pytest.fixture
def publisher(directory):
    """One rank that publishes in place whatever memory it is given."""
    with Publisher(MODEL, "rank0", ["rank0"], run="r", mode="in_place", opener=lambda name: LocalTransport(name)) as one:
        yield one


def test_a_version_whose_directory_was_away_is_withdrawn_the_next_time(publisher, monkeypatch):
    def away(uid):
        raise DirectoryUnavailable("nobody answered")

    publisher.publish(1, whole(checkpoint(1)))
    with monkeypatch.context() as patched:
        patched.setattr(publisher._client, "delete", away)
        with pytest.raises(DirectoryUnavailable):
            publisher.before_update()
    assert publisher.before_update()
    assert publisher._client.latest(MODEL) is None


def test_a_version_that_was_published_although_the_answer_was_lost_is_withdrawn(publisher, monkeypatch):
    add = publisher._client.add_shard

    def lost(*args, **kwargs):
        add(*args, **kwargs)
        raise DirectoryUnavailable("the answer was lost")

    monkeypatch.setattr(publisher._client, "add_shard", lost)
    with pytest.raises(DirectoryUnavailable):
        publisher.publish(1, whole(checkpoint(1)))
    assert publisher._client.latest(MODEL) is not None
    publisher.before_update()
    assert publisher._client.latest(MODEL) is None


def test_memory_that_is_read_outlives_a_version_in_other_memory(publisher, receive):
    held = whole(checkpoint(1))
    memory = [weakref.ref(one.tensor) for one in held]
    publisher.publish(1, held)
    del held
    reading, go_on = threading.Event(), threading.Event()

    def slow(done):
        reading.set()
        go_on.wait(10)

    _, receiver = receive(fault=slow)

    def update():
        with contextlib.suppress(MxError):
            receiver.update(1)

    thread = threading.Thread(target=update)
    thread.start()
    assert reading.wait(10)
    publisher.publish(2, whole(checkpoint(2)))
    gc.collect()
    alive = [one() is not None for one in memory]
    go_on.set()
    thread.join()
    assert all(alive), "a source that frees what is read over tcp dies"
    publisher.before_update()
    publisher.publish(3, whole(checkpoint(3)))
    publisher.before_update()
    gc.collect()
    assert not any(one() is not None for one in memory)


def test_a_version_that_is_published_twice_from_other_memory_is_the_second(publisher, receive):
    publisher.publish(1, whole(checkpoint(1)))
    publisher.publish(1, whole(checkpoint(2)))
    engine, receiver = receive()
    assert receiver.update().version == 1
    assert holds(engine, 2)


def test_a_closed_publisher_publishes_nothing_and_opens_nothing(publisher):
    publisher.publish(1, whole(checkpoint(1)))
    publisher.close()
    publisher.close()
    with pytest.raises(ConfigError, match="slot rank0 of toy/refit is closed"):
        publisher.publish(2, whole(checkpoint(2)))
    assert publisher._transport is None


def test_without_digests_the_readers_of_what_is_overwritten_lose_their_lease(trainer, receive, monkeypatch):
    monkeypatch.setenv("MX_VERIFY_DIGEST", "0")
    source = trainer(1)
    source.publish(1)
    waited = []

    def step(done):
        if done > 20_000 and not waited:
            waited.append(source.before_update())
            source.held(99, 0)

    engine, receiver = receive(fault=step)
    with pytest.raises(RefitFailed, match="was released while"):
        receiver.update()
    assert waited == [False]
    assert engine.serving is None


class Restarting:
    """A directory that starts again, having forgotten everything, after each of the first `times` answers to create_version."""

    def __init__(self, publisher, server, times):
        self.made, self.server = [], server
        self._create, self._times = publisher._client.create_version, times

    def __call__(self, *args, **kwargs):
        self.made.append(self._create(*args, **kwargs))
        if len(self.made) <= self._times:
            address = self.server.address
            self.server.stop()
            self.server = DirectoryServer(address)
            self.server.start()
        return self.made[-1]


@pytest.mark.parametrize(("times", "outage"), [(1, "raise"), (1, "warn"), (2, "warn"), (2, "raise")])
def test_a_directory_that_restarts_while_a_version_is_published_is_told_again_and_then_is_an_outage(
    times, outage, directory, monkeypatch, caplog
):
    publisher = Publisher(MODEL, "rank0", ["rank0"], run="r", outage=outage, opener=lambda name: LocalTransport(name))
    held = whole(checkpoint(1))
    create = Restarting(publisher, directory, times)
    monkeypatch.setattr(publisher._client, "create_version", create)
    try:
        if times == 1:
            uid = publisher.publish(1, held).uid
            assert publisher._client.latest(MODEL).uid == uid
        elif outage == "warn":
            assert publisher.publish(1, held).uid == ""
            assert "was not published, training goes on" in caplog.text
        else:
            with pytest.raises(DirectoryUnavailable, match="forgot version 1 of toy/refit twice"):
                publisher.publish(1, held)
        assert len(create.made) == 2
        assert publisher._current == create.made[1]
        assert list(publisher._manifests._manifests) == [(create.made[1], "rank0")]
        assert publisher.before_update()
        assert publisher.publish(2, held).uid == create.made[2]
    finally:
        publisher.close()
        create.server.stop()


ENDS = """
import sys, torch
from mx_common.refit import Held, Publisher
publisher = Publisher("toy/ends", "rank0", ["rank0"])
weights = torch.ones(64, 64)
print(publisher.publish(1, [Held("w", (64, 64), (0, 0), weights)]).uid, flush=True)
{last}
"""


@pytest.mark.parametrize(("last", "code"), [("", 0), ("raise SystemExit(3)", 3), ("raise ValueError", 1)])
def test_a_trainer_that_ends_without_closing_its_publisher_leaves_no_version_behind(last, code, directory):
    ended = subprocess.run(
        [sys.executable, "-c", ENDS.replace("{last}", last)],
        env={**os.environ, "MX_SERVER_ADDRESS": directory.address},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout.strip() != "") == (code, True), ended.stderr
    with RefitClient(directory.address) as client:
        assert client.versions("toy/ends") == []
        with pytest.raises(SourceLost, match="a version lives as long as the processes that hold it"):
            client.wait_for("toy/ends", None, 0.1)
