"""A version that cannot be installed whole is refused: it is said who or what is at fault, and the engine serves the version before."""

from __future__ import annotations

import threading

import pytest
import torch

from mx_common.errors import RefitFailed, WeightsBroken
from mx_common.refit import Held
from mx_common.transport.local import LocalTransport
from tests.support.refit_toy import ToyEngine, holds

PATHS = pytest.mark.parametrize("path", ["reshard", "staged"])


def test_a_rank_that_never_publishes_is_named(trainer, receive):
    trainer(3).publish(1, ranks=[0, 2])
    engine, receiver = receive()
    with pytest.raises(RefitFailed, match=r"rank1(?s:.)*the weights it was started with still serve"):
        receiver.update(1, timeout=0.5)
    assert engine.serving is None


def rows(held, first):
    """Rank 1's box as one that begins at another row of the tensor, and ends where it ends."""
    return Held(held.name, held.shape, (first, 0), torch.zeros(held.shape[0] - first, held.shape[1], dtype=held.tensor.dtype))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda h: Held(h.name, (h.shape[0] + 1, *h.shape[1:]), h.start, h.tensor),
            r"layers\.1\.k: rank0 publishes it as bfloat16 \[64, 64\] and rank1 publishes it as bfloat16 \[65, 64\]",
        ),
        (
            lambda h: Held(h.name, h.shape, h.start, h.tensor.to(torch.float32)),
            r"layers\.1\.k: rank0 publishes it as bfloat16 \[64, 64\] and rank1 publishes it as float32 \[64, 64\]",
        ),
        (lambda h: rows(h, 28), r"layers\.1\.k: \[0:32, 0:64\] of rank0 and \[28:64, 0:64\] of rank1 overlap in part"),
        (lambda h: rows(h, 36), r"layers\.1\.k \[64, 64\]: nobody holds the box \[32:36, 0:64\]"),
    ],
    ids=["shape", "dtype", "overlap", "gap"],
)
def test_ranks_that_disagree_are_refused_and_the_tensor_is_named(trainer, receive, change, said):
    source = trainer(2)
    source.publish(1, change=lambda rank, held: [change(h) if rank and h.name == "layers.1.k" else h for h in held])
    engine, receiver = receive()
    with pytest.raises(RefitFailed, match=said):
        receiver.update()
    assert engine.serving is None


def test_ranks_whose_agents_bear_one_name_are_refused_and_both_are_named(trainer, receive):
    class Namesake(LocalTransport):
        """As agents of two hosts that each call theirs `trainer`."""

        name = "trainer"

    first = trainer(2)
    first.publish(1)
    engine, receiver = receive()
    receiver.update()
    trainer(2, run="run-2", opener=Namesake).publish(2)
    with pytest.raises(
        RefitFailed, match=r"slots rank0 and rank1 have the same agent name trainer(?s:.)*version 1 still serves"
    ):
        receiver.update()
    assert holds(engine, 1)
    trainer(2, run="run-3").publish(3)
    receiver.update()
    assert holds(engine, 3)


def test_a_gap_is_refused_and_named(trainer, receive):
    trainer(2).publish(1, change=lambda rank, held: [h for h in held if not (rank and h.name == "layers.0.up")])
    with pytest.raises(RefitFailed, match=r"layers\.0\.up"):
        receive()[1].update()


@PATHS
def test_an_optimizer_that_steps_while_it_is_read_costs_the_version_and_not_the_engine(trainer, receive, path):
    source = trainer(2)
    source.publish(1)
    steps = []

    def step(done):
        if receiver.serving == 1 and not steps:
            steps.append(done)
            for rank in range(2):
                source.held(99, rank)  # overwrites in place

    engine, receiver = receive(path, fault=step)
    receiver.update()
    source.before_update()
    source.publish(2)
    with pytest.raises(RefitFailed, match=r"DigestMismatch(?s:.)*version 1 still serve"):
        receiver.update()
    assert holds(engine, 1)
    assert engine.serving == 1
    source.publish(3)
    receiver.update()
    assert holds(engine, 3)


def test_a_transport_that_fails_mid_read_leaves_the_old_version(trainer, receive):
    source = trainer(2)
    source.publish(1)

    def fail(done):
        if receiver.serving == 1 and failing:
            raise RuntimeError("the link broke")

    failing = [True]
    engine, receiver = receive(fault=fail)
    receiver.update()
    source.before_update()
    source.publish(2)
    with pytest.raises(RefitFailed, match="the link broke"):
        receiver.update()
    assert holds(engine, 1)
    failing.clear()
    receiver.update()
    assert holds(engine, 2)


@PATHS
def test_a_parameter_that_no_published_tensor_fills_is_refused_and_the_version_before_serves(trainer, receive, path):
    source = trainer(1)
    source.publish(1)
    engine, receiver = receive(path)
    receiver.update()
    source.before_update()
    source.publish(2, change=lambda rank, held: [h for h in held if h.name not in ("embed", "layers.1.o")])
    with pytest.raises(RefitFailed, match=r"publishes nothing for embed, layers\.1\.o, .*; version 1 still serves"):
        receiver.update()
    assert engine.serving == 1
    assert holds(engine, 1)


def test_a_parameter_that_is_filled_in_part_is_refused(trainer, receive):
    trainer(1).publish(1, change=lambda rank, held: [h for h in held if h.name != "layers.0.k"])
    engine, receiver = receive()
    with pytest.raises(RefitFailed, match=r"fill only part of layers\.0\.qkv"):
        receiver.update()
    assert engine.serving is None


def test_a_loader_that_fails_half_way_makes_the_engine_refuse_until_a_version_is_whole(trainer, receive):
    trainer(1).publish(1)
    engine, receiver = receive("staged", engine=ToyEngine(lost="layers.1.up"))
    with pytest.raises(WeightsBroken, match=r"fails on layers\.1\.up(?s:.)*serves nothing"):
        receiver.update()
    assert "layers.1.up" in engine.refused
    engine.lost = ""
    receiver.update()
    assert (engine.refused, engine.serving, receiver.broken) == ("", 1, "")


def test_without_room_for_a_shadow_a_failed_read_makes_the_engine_refuse(trainer, receive):
    source = trainer(2)
    source.publish(1)
    broken = [True]

    def fail(done):
        if broken and done > 10_000:
            raise RuntimeError("the link broke")

    engine, receiver = receive(fault=fail, shadow="never")
    with pytest.raises(WeightsBroken, match="the link broke"):
        receiver.update()
    assert engine.refused
    broken.clear()
    receiver.update()
    assert holds(engine, 1)
    assert not engine.refused


@PATHS
def test_a_rate_above_the_ceiling_installs_nothing(trainer, receive, path, monkeypatch):
    monkeypatch.setenv("MX_RESHARD_MAX_GBPS", "0.000001")
    trainer(1).publish(1)
    engine, receiver = receive(path)
    with pytest.raises(RefitFailed, match="ImpossibleThroughput"):
        receiver.update()
    assert engine.serving is None
    assert not any(tensor.any() for tensor in engine.parameters().values())


@PATHS
@pytest.mark.parametrize("goes_on", ["after it waited in vain", "without a word"])
def test_a_reader_that_compares_no_digests_installs_nothing_that_may_have_been_overwritten(trainer, receive, path, goes_on):
    source, reading = trainer(2), threading.Lock()
    source.publish(1)

    def overwrite(done):
        if receiver.serving == 1 and reading.acquire(blocking=False):
            if goes_on == "after it waited in vain":
                source.before_update()
            source.publish(3)

    engine, receiver = receive(path, fault=overwrite, verify=False)
    assert not receiver.update().verified
    source.before_update()
    source.publish(2)
    with pytest.raises(RefitFailed, match=r"SourceLost: without digests nobody knows(?s:.)*version 1 still serves"):
        receiver.update(2)
    assert holds(engine, 1)
    receiver.update()
    assert holds(engine, 3)


def test_a_reader_of_a_trainer_that_makes_no_digests_installs_nothing_that_may_have_been_overwritten(
    trainer, receive, monkeypatch
):
    monkeypatch.setenv("MX_VERIFY_DIGEST", "0")
    source = trainer(1)
    source.publish(1)
    monkeypatch.delenv("MX_VERIFY_DIGEST")
    engine, receiver = receive(fault=lambda done: source.publish(2))
    with pytest.raises(RefitFailed, match="SourceLost: without digests nobody knows"):
        receiver.update(1)
    assert engine.serving is None
