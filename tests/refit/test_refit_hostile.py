"""What is done to receivers that their documentation does not ask for: no mixed weights, no wrong report."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import psutil
import pytest
import torch

from mx_common.directory.refit_client import RefitClient
from mx_common.errors import RefitFailed, TransferError, WeightsBroken
from mx_common.refit import Held
from mx_common.refit._memory import Memory
from mx_common.refit.capture import capture
from mx_common.transport.local import LocalTransport
from tests.support.refit_toy import ToyEngine, checkpoint, holds

MODEL = "toy/refit"

PATHS = pytest.mark.parametrize("path", ["reshard", "staged"])


def same(one, other):
    return all(torch.equal(one.parameters()[name], tensor) for name, tensor in other.parameters().items())


def whole(tensors):
    """One rank's boxes that are everything."""
    return [Held(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in tensors.items()]


def breaking(error, after=5000):
    """A fault of the transport while `on` has an element."""

    def fault(done):
        if fault.on and done > after:
            raise error

    fault.on = [True]
    return fault


class Watched(ToyEngine):
    """Notes whether it had to be refused when serving went on."""

    resumed = ()

    @contextlib.contextmanager
    def paused(self):
        try:
            yield
        finally:
            self.resumed = (*self.resumed, "refused" if self.refused else "serving")


@PATHS
def test_what_was_prepared_first_cannot_be_installed_after_a_second_one_took_its_memory(trainer, receive, path):
    source = trainer(1, mode="snapshot")
    source.publish(1)
    engine, receiver = receive(path)
    first = receiver.prepare()
    source.publish(2)
    second = receiver.prepare()
    with pytest.raises(RefitFailed, match="version 1 of toy/refit is not prepared any more"):
        first.install()
    assert engine.serving is None
    second.install()
    assert holds(engine, 2)
    with pytest.raises(RefitFailed, match=r"it was installed(?s:.)*version 2 still serve"):
        second.install()


def test_what_was_prepared_cannot_be_installed_after_a_later_preparation_failed_half_way(trainer, receive):
    source = trainer(2)
    source.publish(1)
    fault = breaking(RuntimeError("the link broke"))
    fault.on.clear()
    engine, receiver = receive(fault=fault)
    first = receiver.prepare()
    source.before_update()
    source.publish(2)
    fault.on.append(True)
    with pytest.raises(RefitFailed):
        receiver.update()
    with pytest.raises(RefitFailed, match="not prepared any more"):
        first.install()
    assert engine.serving is None


def test_a_partial_refit_does_not_bring_back_what_it_did_not_want(trainer, receive):
    source = trainer(2)
    engine, full = receive()
    _, partial = receive(engine=engine, wanted=lambda name: name.endswith(".k"))
    for version, receiver in ((1, full), (2, partial), (3, full), (4, partial)):
        source.before_update()
        source.publish(version)
        receiver.update()
    mixed = ToyEngine()
    mixed.load((name, checkpoint(4 if name.endswith(".k") else 3)[name]) for name in checkpoint(1))
    assert same(engine, mixed), "the shadow of the partial refit remembered version 1"


def test_weights_that_were_read_in_place_serve_only_when_they_are_installed(trainer, receive):
    trainer(1).publish(1)
    engine, receiver = receive(shadow="never")
    ready = receiver.prepare()
    assert "written in place" in engine.refused, "another rank may have failed, and then nobody installs"
    ready.install()
    assert not engine.refused
    assert holds(engine, 1)


def test_mixed_weights_are_refused_before_serving_goes_on(trainer, receive):
    trainer(1).publish(1)
    engine, receiver = receive(engine=Watched(), fault=breaking(RuntimeError("the link broke")), shadow="never")
    with pytest.raises(WeightsBroken):
        receiver.update()
    assert engine.resumed == ("refused",)
    engine, receiver = receive("staged", engine=Watched(lost="layers.1.up"))
    with pytest.raises(WeightsBroken):
        receiver.update()
    assert engine.resumed == ("refused",)


@pytest.mark.parametrize("shadow", ["always", "never"])
def test_an_interrupt_ends_the_transport_and_mixed_weights_are_refused(trainer, receive, shadow):
    trainer(1).publish(1)
    fault = breaking(KeyboardInterrupt())
    engine, receiver = receive(fault=fault, shadow=shadow)
    with pytest.raises(KeyboardInterrupt):
        receiver.update()
    assert [one._closed for one in receive.opened] == [True], "reads that are under way would land in what is read next"
    assert bool(engine.refused) == (shadow == "never")
    fault.on.clear()
    receiver.update()
    assert holds(engine, 1)


def test_a_version_in_several_rounds_that_is_damaged_before_the_first_write_costs_nothing(trainer, receive):
    source = trainer(1)
    source.publish(1)
    stepped = []

    def step(done):
        if receiver.serving == 1 and not stepped:
            stepped.append(done)
            source.held(99, 0)

    engine, receiver = receive("staged", fault=step, staging_bytes=120_000)
    receiver.update()
    source.before_update()
    source.publish(2)
    with pytest.raises(RefitFailed, match="version 1 still serve"):
        receiver.update()
    assert not engine.refused
    assert holds(engine, 1)


def test_a_failure_after_the_weights_were_mixed_does_not_say_that_they_serve(trainer, receive):
    trainer(1).publish(1)
    _, receiver = receive("staged", engine=ToyEngine(lost="layers.1.up"))
    with pytest.raises(WeightsBroken):
        receiver.update()
    with pytest.raises(RefitFailed, match="it serves nothing until a whole version is installed"):
        receiver.update(99, timeout=0.2)


@PATHS
def test_a_hundred_failures_leave_no_memory_descriptors_or_threads_behind(trainer, receive, path):
    trainer(2).publish(1)
    fault = breaking(RuntimeError("the link broke"), after=-1)
    engine, receiver = receive(path, fault=fault)
    process, seen = psutil.Process(), []
    for _ in range(100):
        with pytest.raises(RefitFailed):
            receiver.update()
        seen.append((process.num_fds(), threading.active_count(), process.memory_info().rss))
    assert seen[-1][0] <= seen[10][0] + 2
    assert seen[-1][1] <= seen[10][1] + 2
    assert seen[-1][2] <= seen[10][2] + 20 * (1 << 20)
    fault.on.clear()
    receiver.update()
    assert holds(engine, 1)


def test_memory_of_a_transport_that_cannot_be_closed_is_never_read_into_again(trainer, receive, monkeypatch):
    source = trainer(1)
    source.publish(1)
    fault = breaking(RuntimeError("the link broke"))
    fault.on.clear()
    engine, receiver = receive(fault=fault)
    receiver.update()
    before = receiver._reader._memory
    (held,), close = receive.opened, LocalTransport.close

    def stuck(transport):
        close(transport)
        if transport is held:
            raise TransferError("the agent is still referenced")

    monkeypatch.setattr(LocalTransport, "close", stuck)
    fault.on.append(True)
    with pytest.raises(RefitFailed, match="the link broke"):
        receiver.update()
    fault.on.clear()
    receiver.update()
    assert receiver._reader._memory is not before
    assert holds(engine, 1)


def test_a_newest_version_that_is_superseded_before_it_is_leased_is_not_insisted_on(trainer, receive, monkeypatch):
    source = trainer(1, mode="snapshot")
    source.publish(1)
    engine, receiver = receive()
    lease, late = RefitClient.lease, []

    def leased(client, uid, worker_id):
        if not late:
            late.append(uid)
            source.publish(2)
        return lease(client, uid, worker_id)

    monkeypatch.setattr(RefitClient, "lease", leased)
    assert receiver.update().version == 2
    assert holds(engine, 2)


@PATHS
def test_tensors_that_the_engine_knows_none_of_are_no_version(trainer, receive, path):
    renamed = lambda rank, held: [Held("x_" + h.name.replace(".", "_"), h.shape, h.start, h.tensor) for h in held]  # noqa: E731
    trainer(1).publish(1, change=renamed)
    engine, receiver = receive(path)
    with pytest.raises(RefitFailed, match=r"uses none of the 16 tensors(?s:.)*x_embed"):
        receiver.update()
    assert engine.serving is None


def test_full_tensors_that_fill_a_parameter_in_part_are_refused_and_the_rest_is_named(trainer, receive):
    source = trainer(1)
    source.publish(1, change=lambda rank, held: [h for h in held if h.name != "layers.0.k"])
    engine, receiver = receive("staged")
    with pytest.raises(RefitFailed, match=r"fill only part of layers\.0\.qkv"):
        receiver.update()
    assert engine.serving is None
    source.before_update()
    extra = Held("value_head", (4, 4), (0, 0), torch.ones(4, 4, dtype=torch.bfloat16))
    source.publish(2, change=lambda rank, held: [*held, extra])
    done = receiver.update()
    assert (done.derived, done.unused) == (("rotary",), ("value_head",))


def test_what_a_partial_refit_does_not_want_is_not_called_derived(trainer, receive):
    trainer(1).publish(1)
    assert receive(wanted=lambda name: name == "norm")[1].update().derived == ()


class Scaling(ToyEngine):
    """Computes a part of a fused parameter, so that this part goes through its loader."""

    def _load(self, params, stream):
        super()._load(params, ((name, tensor * 2 if name.endswith(".v") else tensor) for name, tensor in stream))


@pytest.mark.parametrize("engine", [ToyEngine, Scaling], ids=["cast", "computed"])
def test_memory_that_is_not_filled_yet_is_not_taken_for_nan(trainer, receive, monkeypatch, engine):
    wide = lambda rank, held: [  # noqa: E731
        Held(h.name, h.shape, h.start, h.tensor.float()) if h.name.endswith(".k") and engine is ToyEngine else h for h in held
    ]
    trainer(1).publish(1, change=wide)
    made = Memory.area
    monkeypatch.setattr(Memory, "area", lambda memory, nbytes: made(memory, nbytes).fill_(255))  # NaN in every float dtype
    one, receiver = receive(engine=engine())
    assert receiver.update().nonfinite == ()
    wanted = engine()
    wanted.load(checkpoint(1).items())
    assert same(one, wanted)


def test_a_number_that_a_cast_makes_infinite_is_reported(trainer, receive):
    def spoil(rank, held):
        next(h for h in held if h.name == "norm").tensor[0] = 1e30
        return held

    trainer(1, dtype=torch.float32).publish(1, change=spoil)
    engine, receiver = receive(engine=ToyEngine(dtype=torch.float16))
    assert receiver.update().nonfinite == ("norm",)
    assert engine.parameters()["norm"].isinf().any()


def test_a_parameter_with_gaps_in_memory_is_filled(trainer, receive):
    class Padded(ToyEngine):
        def capture(self, tensors):
            twin = {n: torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta") for n, p in self._params.items()}
            return capture(lambda stream: self._load(twin, stream), twin, tensors)

    trainer(2).publish(1)
    engine = Padded()
    for name in ("embed", "layers.0.o", "layers.1.down", "layers.0.qkv"):
        rows, columns = engine._params[name].shape
        engine._params[name] = torch.zeros(rows, columns + 16, dtype=torch.bfloat16)[:, :columns]
    receive(engine=engine)[1].update()
    assert holds(engine, 1)


def test_a_receiver_that_is_closed_keeps_no_memory(trainer, receive):
    trainer(1).publish(1)
    _, receiver = receive()
    receiver.update()
    memory = weakref.ref(receiver._reader._memory)
    receiver.close()
    gc.collect()
    assert memory() is None


def test_the_old_layouts_memory_is_gone_before_the_new_ones_is_taken(trainer, receive, monkeypatch):
    first = trainer(1)
    first.publish(1)
    engine, receiver = receive()
    receiver.update()
    old, alive = weakref.ref(receiver._reader._memory), []
    recorded = engine.capture
    monkeypatch.setattr(
        engine, "capture", lambda tensors: (gc.collect(), alive.append(old() is not None)) and recorded(tensors)
    )
    first.close()
    trainer(1, run="run-2", dtype=torch.float32).publish(1)
    receiver.update()
    assert alive == [False]
    assert holds(engine, 1, source=torch.float32)
