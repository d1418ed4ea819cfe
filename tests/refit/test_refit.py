"""A trainer's version reaches an engine whole, or not at all."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator

from mx_common.errors import RefitFailed
from mx_common.refit import Held
from tests.support.refit_toy import ToyEngine, checkpoint, expected, holds, matching

MODEL = "toy/refit"

PATHS = pytest.mark.parametrize("path", ["reshard", "staged"])
COLUMNS = pytest.mark.parametrize("columns", ["", "o|down", "q|embed|down"])


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
