"""The ranks of one engine install a version together or not at all: real receivers in threads, a gather of the threads."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from mx_common.errors import ConfigError, RefitFailed, WeightsBroken
from mx_common.refit.drive import Asked, Update
from mx_common.refit.ranks import Ranks, Session
from tests.refit.conftest import MODEL
from tests.support.refit_toy import ToyEngine, expected

log = logging.getLogger("tests.refit")


class Together:
    """`gather` among threads: what every rank said, in their order."""

    def __init__(self, world):
        self.said = [None] * world
        self.barrier = threading.Barrier(world, timeout=60)
        self.first_spoke = threading.Event()

    def gather(self, rank):
        def of_all(said):
            self.said[rank] = said
            self.first_spoke.set()
            self.barrier.wait()
            answers = list(self.said)
            self.barrier.wait()
            return answers

        return of_all


@pytest.fixture
def engines(receive):
    """Makes the ranks of one engine, and calls each of them at once: (engines, call, together)."""
    pools = []

    def make(world, path="reshard", **settings):
        together = Together(world)
        pairs = [receive(path, rank, world, engine=ToyEngine(rank, world), **settings) for rank in range(world)]
        ranks = [Ranks(receiver, world, together.gather(n), Asked(path=path)) for n, (_, receiver) in enumerate(pairs)]
        pools.append(ThreadPoolExecutor(world))

        def call(step):
            return list(pools[-1].map(step, ranks, range(world)))

        return [engine for engine, _ in pairs], call, together

    yield make
    for pool in pools:
        pool.shutdown()


def serves(engine, seed):
    wanted = expected(seed, engine.rank, engine.world)
    return all(torch.equal(engine.parameters()[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_that_are_all_prepared_install_the_same_version(world, trainer, engines):
    trainer(2).publish(3)
    ranks, call, _ = engines(world)
    assert call(lambda rank, _: rank.prepare(None, 5)) == [None] * world
    assert call(lambda rank, _: rank.prepared) == [True] * world
    assert not any(serves(engine, 3) for engine in ranks)
    assert call(lambda rank, _: rank.install()) == [None] * world
    assert all(serves(engine, 3) for engine in ranks)
    assert call(lambda rank, _: rank.prepared) == [False] * world


def test_a_rank_that_cannot_prepare_keeps_all_of_them_at_the_old_version(trainer, engines):
    source = trainer(2)
    source.publish(1)
    ranks, call, _ = engines(2)
    call(lambda rank, _: rank.prepare(1, 5) or rank.install())
    source.before_update()
    source.publish(2)
    failures = call(lambda rank, n: rank.prepare(2 if n == 0 else 9, 0.3))
    assert failures[0] == failures[1]
    assert failures[0].text.startswith("rank 1: version 9 of toy/refit was not installed")
    assert not failures[0].broken
    assert call(lambda rank, _: rank.prepared) == [False, False]
    assert all(serves(engine, 1) for engine in ranks)
    error = failures[1].error()
    assert type(error) is RefitFailed
    assert isinstance(error.__cause__, RefitFailed), "the rank that failed knows what of"
    assert failures[0].error().__cause__ is None


def test_a_rank_that_is_refused_an_update_by_its_engine_keeps_all_of_them_from_it(trainer, engines):
    trainer(2).publish(1)
    ranks, call, _ = engines(2)
    failures = call(lambda rank, n: rank.prepare(1, 5, "requests are running" if n == 1 else ""))
    assert failures[0] == failures[1]
    assert failures[0].text == "rank 1: requests are running"
    assert not failures[0].broken
    assert call(lambda rank, _: rank.prepared) == [False, False]
    assert [engine.serving for engine in ranks] == [None, None]


def test_a_rank_that_alone_finds_no_directory_says_so_where_the_others_wait_for_it(trainer, engines):
    trainer(2).publish(1)
    _, call, _ = engines(2)

    def prepare(rank, n):
        if n == 1:
            rank.receiver.job = replace(rank.receiver.job, server="nowhere")
        return rank.prepare(1, 5)

    failures = call(prepare)
    assert failures[0] == failures[1]
    assert failures[0].text.startswith("rank 1: version 1 of toy/refit was not installed: ConfigError: directory address")


def test_ranks_that_found_different_newest_versions_install_none(trainer, engines):
    trainer(2).publish(1)
    ranks, call, together = engines(2)

    def prepare(rank, n):
        if n == 1:  # another version comes when the first rank has found one
            assert together.first_spoke.wait(60)
            trainer(2, run="run-2").publish(2)
        return rank.prepare(None, 5)

    failures = call(prepare)
    assert failures[0] == failures[1]
    assert "the ranks found different versions" in failures[0].text
    assert call(lambda rank, _: rank.prepared) == [False, False]
    assert [engine.serving for engine in ranks] == [None, None]


def test_ranks_that_found_one_number_of_two_runs_install_neither(trainer, engines):
    first = trainer(2, run="run-1")
    first.publish(1)
    ranks, call, together = engines(2)

    def prepare(rank, n):
        if n == 1:  # the trainer is started again when the first rank has found its version
            assert together.first_spoke.wait(60)
            first.close()
            trainer(2, run="run-2").publish(1, seed=5)
        return rank.prepare(1, 5)

    failures = call(prepare)
    assert failures[0] == failures[1]
    assert "the ranks found different versions" in failures[0].text
    assert [engine.serving for engine in ranks] == [None, None]


def test_ranks_of_which_one_was_written_in_place_say_that_the_engine_serves_nothing(trainer, engines):
    source = trainer(2)
    source.publish(1)
    ranks, call, _ = engines(2, shadow="never")
    call(lambda rank, _: rank.prepare(1, 5) or rank.install())
    source.before_update()
    source.publish(2)
    for _ in range(2):  # and still when it fails again
        failures = call(lambda rank, n: rank.prepare(2 if n == 0 else 9, 0.3))
        assert failures[0] == failures[1]
        assert isinstance(failures[0].error(), WeightsBroken)
        assert failures[0].text.startswith("rank 1: version 9 of toy/refit was not installed")
        assert failures[0].text.endswith(
            "rank 0 was written in place, so the engine serves nothing until a whole version is installed"
        )
    assert [bool(engine.refused) for engine in ranks] == [True, False]
    failures = call(lambda rank, n: rank.prepare(9, 0.3))
    assert "its weights are mixed since an earlier failure" in failures[0].text
    assert failures[0].broken
    assert call(lambda rank, _: rank.prepare(2, 5) or rank.install()) == [None, None]
    assert all(serves(engine, 2) for engine in ranks)


def test_a_rank_whose_loader_fails_half_way_breaks_the_update_of_all(trainer, engines):
    trainer(2).publish(1)
    ranks, call, _ = engines(2, "staged")
    ranks[0].lost = "layers.1.up"
    assert call(lambda rank, _: rank.prepare(1, 5)) == [None, None]
    failures = call(lambda rank, _: rank.install())
    assert failures[0] == failures[1]
    assert failures[0].text.startswith("rank 0: ")
    assert isinstance(failures[0].error(), WeightsBroken)
    assert ranks[0].refused


def test_what_is_forgotten_is_not_prepared(trainer, engines):
    trainer(2).publish(1)
    _, call, _ = engines(1)
    assert call(lambda rank, _: rank.prepare(1, 5)) == [None]
    call(lambda rank, _: rank.forget())
    assert call(lambda rank, _: rank.prepared) == [False]


@pytest.fixture
def session(receive):
    """Makes sessions of one rank; `made`: the settings that ranks were made for."""

    def make(**options):
        made = []

        def ranks(asked):
            made.append(asked)
            _, receiver = receive(asked.path)
            return Ranks(receiver, 1, lambda said: [said], asked)

        return Session(ranks, log, begin="call init first", **options), made

    return make


def test_a_session_keeps_what_it_has_for_the_same_settings_and_changes_it_for_others(session):
    one, made = session()
    with pytest.raises(ConfigError, match="call init first"):
        one.prepare(Update(1, 0.2))
    for path in ("reshard", "reshard", "staged"):
        one.init(Asked(MODEL, path))
    assert made == [Asked(MODEL, "reshard"), Asked(MODEL, "staged")]
    one.close()
    one.close()
    one.init(Asked(MODEL, "staged"))
    assert len(made) == 3


def test_a_session_installs_what_was_prepared_and_nothing_otherwise(session, trainer, caplog):
    trainer(2).publish(4)
    one, _ = session()
    one.start()
    one.init(Asked(MODEL))
    one.install()
    assert "no version prepared" in caplog.text
    for forget in (one.start, lambda: one.init(Asked(MODEL))):
        one.prepare(Update(4, 5))
        forget()
        caplog.clear()
        one.install()
        assert "no version prepared" in caplog.text
    one.prepare(Update(timeout=5))
    one.install()
    with pytest.raises(RefitFailed, match="no version 9"):
        one.prepare(Update(9, 0.2))


def test_a_rank_that_the_engine_does_not_listen_to_raises_nothing_and_installs_nothing(session, caplog):
    one, _ = session(speaks=False)
    one.init(Asked(MODEL))
    one.prepare(Update(9, 0.2))
    one.install()
    assert "no version prepared" in caplog.text
