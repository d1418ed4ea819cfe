"""A trainer's version reaches an engine whole, or not at all."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator

from mx_common.errors import RefitFailed, WeightsBroken
from mx_common.refit import Held
from mx_common.transport.local import LocalTransport
from tests.support.refit_toy import ToyEngine, checkpoint, expected

MODEL = "toy/refit"

PATHS = pytest.mark.parametrize("path", ["reshard", "staged"])
COLUMNS = pytest.mark.parametrize("columns", ["", "o|down", "q|embed|down"])


def holds(engine, seed, dtype=torch.bfloat16, source=None):
    """Whether `engine` has exactly what its own loader would have made of the version."""
    wanted = expected(seed, engine.rank, engine.world, dtype, source)
    return all(torch.equal(engine.parameters()[name], tensor) for name, tensor in wanted.items())


def matching(columns):
    return lambda name: name.rpartition(".")[2] in columns.split("|")


@PATHS
@COLUMNS
@pytest.mark.parametrize(("trainers", "world"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_every_version_arrives_as_the_engines_own_loader_would_have_made_it(trainer, receive, path, columns, trainers, world):
    source = trainer(trainers, columns=matching(columns))
    ranks = [receive(path, rank, world) for rank in range(world)]
    for version in (1, 2, 3):
        source.before_update()
        source.publish(version)
        for engine, receiver in ranks:
            done = receiver.update()
            assert (done.version, engine.serving, receiver.serving) == (version, version, version)
            assert done.verified
            assert holds(engine, version)


@PATHS
def test_weights_of_another_dtype_are_cast_as_the_loader_casts_them(trainer, receive, path):
    trainer(2, dtype=torch.float32).publish(1)
    engine, receiver = receive(path)
    receiver.update()
    assert holds(engine, 1, source=torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@PATHS
def test_staging_that_holds_a_part_of_the_model_at_a_time_is_enough(trainer, receive, path, dtype):
    trainer(2, dtype=dtype, columns=matching("o|down")).publish(1)
    engine, receiver = receive(path, staging_bytes=250_000)
    receiver.update()
    assert holds(engine, 1, source=dtype)


def test_a_tensor_that_staging_cannot_hold_is_refused_with_the_bytes_it_takes(trainer, receive):
    trainer(1).publish(1)
    _, receiver = receive("staged", staging_bytes=20_000)
    with pytest.raises(RefitFailed, match=r"embed needs 12288 bytes of staging .* raise MX_STAGING_BYTES to 24576"):
        receiver.update()


@PATHS
def test_live_parameters_keep_their_addresses(trainer, receive, path):
    source = trainer(2)
    engine, receiver = receive(path)
    before = {name: tensor.data_ptr() for name, tensor in engine.parameters().items()}
    for version in (1, 2):
        source.before_update()
        source.publish(version)
        receiver.update()
    assert {name: tensor.data_ptr() for name, tensor in engine.parameters().items()} == before


@PATHS
def test_both_paths_write_records_of_one_schema_with_every_source(trainer, receive, records, path, monkeypatch):
    monkeypatch.setenv("MX_FLOOR_MIN_BYTES", "0")
    trainer(2).publish(4)
    receive(path)[1].update()
    record, _ = records()
    assert (record["schema"], record["path"], record["version"], record["verdict"]) == ("refit-throughput-v1", path, 4, "ok")
    assert (record["engine"], record["framework"], record["rank"], record["step"]) == ("toy", "toy", 0, 4)
    assert {peer["source"] for peer in record["peers"]} == {"rank0", "rank1"}
    assert sum(peer["wire_bytes"] for peer in record["peers"]) == record["wire_bytes"] >= record["minimum_bytes"]
    assert sum(record["choice"].values()) == record["wire_bytes"]


@PATHS
def test_a_version_that_serves_has_a_record_of_all_its_stages_and_one_that_is_only_prepared_has_not(
    trainer, receive, records, path
):
    trainer(2).publish(4)
    receiver = receive(path)[1]
    ready = receiver.prepare()
    (moved,) = records()
    ready.install()
    _, installed = records()
    schema = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "refit-installed-v1.json").read_text())
    Draft202012Validator(schema).validate(installed)
    assert installed["stages_s"].keys() == moved["stages_s"].keys() | {"install"}
    assert all(installed["stages_s"][stage] == taken for stage, taken in moved["stages_s"].items())
    shared = ("path", "engine", "model", "version", "rank", "world", "host", "step", "worker_id")
    assert [installed[key] for key in shared] == [moved[key] for key in shared]


def test_prepared_is_not_installed(trainer, receive):
    trainer(2).publish(1)
    engine, receiver = receive()
    ready = receiver.prepare()
    assert engine.serving is None
    assert not any(tensor.any() for tensor in engine.parameters().values())
    ready.install()
    assert holds(engine, 1)


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


@PATHS
def test_a_version_that_is_deleted_while_it_is_read_is_still_whole(trainer, receive, path):
    source = trainer(2)
    source.publish(1)
    asked, released = threading.Lock(), []

    def delete(done):
        if asked.acquire(blocking=False):  # once, whichever of the sources is read first
            released.append(source.ranks[0].before_update())

    engine, receiver = receive(path, fault=delete)
    receiver.update()
    assert released == [False], "the publisher waited for the reader, in vain within its bound"
    assert holds(engine, 1)


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


def test_another_receiver_of_an_engine_goes_on_where_the_first_was_closed(trainer, receive):
    source = trainer(2)
    source.publish(1)
    engine, receiver = receive()
    receiver.update()
    receiver.close()
    source.before_update()
    source.publish(2)
    _, again = receive(engine=engine)
    again.update()
    assert holds(engine, 2)


@pytest.mark.parametrize("world", [2, 3])
def test_a_trainer_that_restarts_elsewhere_or_with_another_layout_is_followed(trainer, receive, world):
    first = trainer(2)
    first.publish(7)
    engine, receiver = receive()
    receiver.update()
    first.close()
    second = trainer(world, run="run-2", columns=matching("" if world == 2 else "o|down"))
    second.publish(3, seed=33)
    assert receiver.update().version == 3, "the newer run counts, not the higher number of the old one"
    assert holds(engine, 33)
    assert engine.captures == 1 if world == 2 else 2


@PATHS
def test_a_version_that_comes_after_a_higher_one_is_installed_only_when_it_is_asked_for(trainer, receive, path):
    source, late = trainer(1, mode="snapshot"), trainer(1, mode="snapshot")
    source.publish(5)
    engine, receiver = receive(path)
    receiver.update()
    late.publish(4)
    for asked, installed in ((None, 5), (4, 4), (None, 5)):
        assert (receiver.update(asked).version, receiver.serving) == (installed, installed)
        assert holds(engine, installed)
    late.publish(6)
    assert receiver.update().version == 6
    for past in (4, 5):
        with pytest.raises(RefitFailed, match=rf"no version {past} of toy/refit was READY (?s:.)*version 6 still serves"):
            receiver.update(past, timeout=0.2)
    assert holds(engine, 6)


def test_what_the_engine_makes_itself_is_named_as_derived(trainer, receive):
    trainer(1).publish(1)
    assert receive()[1].update().derived == ("rotary",)


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


@PATHS
def test_whoever_asks_for_all_that_is_published_keeps_the_rest_as_it_serves(trainer, receive, path):
    source = trainer(1)
    source.publish(1)
    engine, receiver = receive(path, wanted=lambda name: True)
    receiver.update()
    source.before_update()
    source.publish(2, change=lambda rank, held: [h for h in held if h.name != "embed"])
    receiver.update()
    assert torch.equal(engine.parameters()["embed"], checkpoint(1)["embed"])
    assert torch.equal(engine.parameters()["norm"], checkpoint(2)["norm"])


def test_a_parameter_that_is_filled_in_part_is_refused(trainer, receive):
    trainer(1).publish(1, change=lambda rank, held: [h for h in held if h.name != "layers.0.k"])
    engine, receiver = receive()
    with pytest.raises(RefitFailed, match=r"fill only part of layers\.0\.qkv"):
        receiver.update()
    assert engine.serving is None


@PATHS
def test_what_a_rank_needs_is_counted_by_its_own_layout_whatever_is_pulled(trainer, receive, path):
    trainer(1).publish(1)
    mine = sum(tensor.nbytes for name, tensor in expected(1, 0, 2).items() if name != "rotary")
    everything = sum(tensor.nbytes for tensor in checkpoint(1).values())
    done = receive(path, 0, 2)[1].update()
    assert done.minimum_bytes == mine
    assert done.wire_bytes == everything, "full tensors, and whole row blocks of tensors as small as these"


def test_a_tensor_that_the_engine_does_not_have_is_named_as_unused(trainer, receive):
    extra = Held("value_head", (4, 4), (0, 0), torch.ones(4, 4, dtype=torch.bfloat16))
    trainer(1).publish(1, change=lambda rank, held: [*held, extra])
    assert receive()[1].update().unused == ("value_head",)


@PATHS
def test_nan_is_installed_and_reported(trainer, receive, path, caplog):
    def spoil(rank, held):
        next(h for h in held if h.name == "norm").tensor[0] = float("nan")
        return held

    trainer(1).publish(1, change=spoil)
    engine, receiver = receive(path)
    assert receiver.update().nonfinite == ("norm",)
    assert engine.parameters()["norm"].isnan().any()
    assert "NaN or infinity in norm" in caplog.text


@PATHS
def test_a_partial_refit_leaves_the_rest_as_it_serves(trainer, receive, path):
    source = trainer(2)
    source.publish(1)
    engine, receiver = receive(path)
    receiver.update()
    source.before_update()
    source.publish(2)
    _, partial = receive(path, engine=engine, wanted=lambda name: ".k" in name or name == "norm")
    done = partial.update()
    wanted = {name: (2 if ".k" in name or name == "norm" else 1) for name in checkpoint(1)}
    mixed = ToyEngine()
    mixed.load((name, checkpoint(seed)[name]) for name, seed in wanted.items())
    assert all(torch.equal(engine.parameters()[name], tensor) for name, tensor in mixed.parameters().items())
    assert done.wire_bytes == sum(checkpoint(1)[name].nbytes for name, seed in wanted.items() if seed == 2)


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
