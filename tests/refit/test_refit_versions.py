"""How a publisher and a receiver live on from one version to the next."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

import pytest
import torch

from mx_common.directory import DirectoryServer
from mx_common.errors import RefitFailed, TransferTimeout, WeightsBroken
from mx_common.refit import Held, Publisher, receive_full
from mx_common.transport.local import LocalTransport
from tests.support.refit_toy import ToyEngine, checkpoint, holds, matching

MODEL = "toy/refit"


def five_rounds(rank, held):
    """Tensors of which half of the least MX_STAGING_BYTES holds one."""
    return [Held(f"large.{n}", (300, 300), (0, 0), torch.full((300, 300), float(n))) for n in range(5)]


def test_a_snapshot_is_not_touched_by_the_optimizer(trainer, receive):
    source = trainer(2, mode="snapshot")
    source.publish(1)
    for rank in range(2):
        source.held(2, rank)
    engine, receiver = receive()
    receiver.update()
    assert holds(engine, 1)


def test_published_without_digests_is_used_and_said_to_be_unverified(trainer, receive, monkeypatch):
    monkeypatch.setenv("MX_VERIFY_DIGEST", "0")
    trainer(2).publish(1)
    monkeypatch.delenv("MX_VERIFY_DIGEST")
    engine, receiver = receive()
    assert receiver.update().verified is False
    assert holds(engine, 1)


def test_the_plan_is_kept_while_nothing_moves(trainer, receive):
    source = trainer(2)
    engine, receiver = receive()
    plans = []
    for version in (1, 2, 3):
        source.before_update()
        source.publish(version)
        receiver.update()
        plans.append(receiver._planner._plans)
    assert plans[0] is plans[1] is plans[2]
    assert engine.captures == 1


def test_full_tensors_can_be_received_without_an_engine(trainer, records, monkeypatch):
    monkeypatch.setattr("mx_common.refit.full.open_transport", lambda name: LocalTransport(name))
    monkeypatch.setenv("MX_STAGING_BYTES", str(1 << 20))
    trainer(2, columns=matching("o|down")).publish(3)
    with contextlib.closing(receive_full(MODEL)) as tensors:
        received = {name: tensor.clone() for name, tensor in tensors}
    assert received.keys() == checkpoint(3).keys()
    assert all(torch.equal(tensor, checkpoint(3)[name]) for name, tensor in received.items())
    (record,) = records()
    assert (record["path"], record["version"]) == ("staged", 3)


def test_a_source_may_take_its_seconds_once_for_a_version_and_not_once_for_every_round(trainer, monkeypatch):
    trainer(1).publish(1, change=five_rounds)
    monkeypatch.setenv("MX_TRANSFER_TIMEOUT", "30")
    monkeypatch.setenv("MX_STAGING_BYTES", str(1 << 20))
    limits = []

    class Slow(LocalTransport):
        """A link on which every read takes 8 seconds."""

        def read(self, *args, timeout, **kwargs):
            limits.append(timeout)
            return replace(super().read(*args, timeout=timeout, **kwargs), wire_seconds=8.0)

    monkeypatch.setattr("mx_common.refit.full.open_transport", Slow)
    with pytest.raises(TransferTimeout, match=r"rank0 .*32\.0 s .*30 s .*MX_TRANSFER_TIMEOUT"):
        list(receive_full(MODEL))
    assert limits == [30, 22, 14, 6]


def test_what_the_consumer_of_full_tensors_takes_is_not_the_sources_time(trainer, monkeypatch):
    trainer(1).publish(1, change=five_rounds)
    monkeypatch.setenv("MX_TRANSFER_TIMEOUT", "1")
    monkeypatch.setenv("MX_STAGING_BYTES", str(1 << 20))
    monkeypatch.setattr("mx_common.refit.full.open_transport", lambda name: LocalTransport(name))
    with contextlib.closing(receive_full(MODEL)) as tensors:
        next(tensors)
        time.sleep(1.2)
        assert len(list(tensors)) == 4


def test_an_iterator_of_full_tensors_that_is_closed_early_holds_the_version_no_longer(trainer, monkeypatch):
    monkeypatch.setattr("mx_common.refit.full.open_transport", lambda name: LocalTransport(name))
    source = trainer(1)
    source.publish(1)
    tensors = receive_full(MODEL)
    next(tensors)
    tensors.close()
    assert source.before_update()


def test_a_tensor_that_the_engines_loader_does_not_take_is_refused_before_anything_is_written(trainer, receive):
    class Strict(ToyEngine):
        def _load(self, params, stream):
            for name, tensor in stream:
                if name == "value_head":
                    raise ValueError("there is no parameter named value_head")
                super()._load(params, [(name, tensor)])

    extra = Held("value_head", (4, 4), (0, 0), torch.ones(4, 4, dtype=torch.bfloat16))
    trainer(1).publish(1, change=lambda rank, held: [*held, extra])
    engine, receiver = receive(engine=Strict())
    with pytest.raises(RefitFailed, match=r"loader does not take value_head .*no parameter named value_head"):
        receiver.update()
    assert (engine.refused, engine.serving) == ("", None)


def test_a_trainer_that_tolerates_an_outage_goes_on_training(directory, caplog):
    publisher = Publisher(MODEL, "rank0", ["rank0"], run="r", outage="warn", opener=lambda name: LocalTransport(name))
    held = [Held("w", (4,), (0,), torch.ones(4))]
    assert publisher.publish(1, held).uid
    address = directory.address
    directory.stop()
    assert publisher.before_update() is False
    assert publisher.publish(2, held).uid == ""
    assert "was not published, training goes on" in caplog.text
    with DirectoryServer(address):
        assert publisher.publish(3, held).uid
        publisher.close()


def test_a_partial_refit_does_not_mend_mixed_weights(trainer, receive):
    source = trainer(1)
    source.publish(1)
    engine, receiver = receive("staged", engine=ToyEngine(lost="layers.1.up"))
    with pytest.raises(WeightsBroken):
        receiver.update()
    engine.lost = ""
    _, partial = receive(engine=engine, wanted=lambda name: name == "norm")
    with pytest.raises(RefitFailed, match="a part cannot mend weights that are mixed"):
        partial.update()
    assert engine.refused
    receiver.update()
    assert holds(engine, 1)
    assert not engine.refused
