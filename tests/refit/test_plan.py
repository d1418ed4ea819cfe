"""Plans of layouts that have names, how replicas share, and what is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from mx_common.errors import ConfigError, CoverageError, ManifestMismatch
from mx_common.refit.held import Held
from mx_common.refit.pieces import Piece, Pieces
from mx_common.refit.plan import CostModel, Plan, make_plan
from mx_common.refit.table import Agent, ShardTable, row_block_digests
from tests.support.refit_memory import ENGINE, NEVER_PULL, Box, Engine, Trainer, check, tensor


def laid_out(shape: Sequence[int], shards: Sequence[Box], blocks: int = 1) -> tuple[Trainer, Engine]:
    tensors = {"w": tensor(shape)}
    trainer = Trainer(tensors, agents=len(shards))
    for agent, (start, size) in enumerate(shards):
        trainer.hold("w", start, size, agent, blocks=blocks)
    return trainer, Engine(tensors)


@pytest.mark.parametrize("verify", [False, True])
def test_tp2_rows_into_tp1_are_two_reads_in_place(verify: bool) -> None:
    trainer, engine = laid_out((8, 6), [((0, 0), (4, 6)), ((4, 0), (4, 6))], blocks=2)
    engine.want("w", (0, 0), (8, 6), engine.room(96), (12, 2))
    plan = make_plan(trainer.table(), Pieces.of(engine.pieces), verify=verify)
    check(plan, trainer, engine)
    assert plan.reads.length.tolist() == [48, 48]
    assert plan.reads.blocks.tolist() == [2, 2]
    assert plan.wire_bytes == plan.minimum_bytes == 96
    assert plan.choice == {"exact": 96, "whole": 0}


def test_uneven_fsdp_rows_into_tp2_columns_stay_one_strided_row_a_shard_and_read_the_minimum() -> None:
    trainer, engine = laid_out((7, 6), [((0, 0), (4, 6)), ((4, 0), (3, 6))])
    engine.want("w", (0, 3), (7, 3), engine.room(42), (6, 2))
    plan = make_plan(trainer.table(), Pieces.of(engine.pieces), cost=NEVER_PULL, verify=False)
    check(plan, trainer, engine)
    assert (plan.reads.length.tolist(), plan.reads.count.tolist()) == ([6, 6], [4, 3])
    assert (plan.reads.remote_stride.tolist(), plan.reads.local_stride.tolist()) == ([12, 12], [6, 6])
    assert (plan.wire_bytes, plan.minimum_bytes, plan.descriptors) == (42, 42, 7)


def test_columns_that_must_be_verified_are_pulled_as_whole_shards_once_for_all_pieces_that_need_them() -> None:
    trainer, engine = laid_out((4, 6), [((0, 0), (4, 6))])
    for column in (0, 2, 4):
        engine.want("w", (0, column), (4, 2), engine.room(16), (4, 2))
    plan = make_plan(trainer.table(), Pieces.of(engine.pieces))
    check(plan, trainer, engine)
    assert (plan.pulls.nbytes.tolist(), len(plan.copies), len(plan.reads)) == ([48], 3, 0)
    assert plan.wire_bytes == plan.minimum_bytes == plan.staging_bytes == 48


def test_rows_that_cut_a_digest_block_are_pulled_at_the_ends_and_land_in_place_between() -> None:
    trainer, engine = laid_out((12, 2), [((0, 0), (12, 2))], blocks=4)
    engine.want("w", (1, 0), (10, 2), engine.room(40), (4, 2))
    plan = make_plan(trainer.table(), Pieces.of(engine.pieces))
    check(plan, trainer, engine)
    assert (plan.reads.first_block.tolist(), plan.reads.blocks.tolist()) == ([1], [2])
    assert sorted(zip(plan.pulls.first_row.tolist(), plan.pulls.rows.tolist(), strict=True)) == [(0, 3), (9, 3)]
    assert plan.choice == {"exact": 24, "whole": 24}


def test_fused_qkv_and_gate_up_are_filled_at_their_rows() -> None:
    tensors = {name: tensor((rows, 4), seed=rows) for name, rows in (("q", 8), ("k", 2), ("v", 3), ("gate", 6), ("up", 5))}
    trainer, engine = Trainer(tensors, agents=2), Engine(tensors)
    for name, values in tensors.items():
        half = values.shape[0] // 2
        trainer.hold(name, (0, 0), (half, 4), 0)
        trainer.hold(name, (half, 0), (values.shape[0] - half, 4), 1)
    for group in (("q", "k", "v"), ("gate", "up")):
        at = engine.room(sum(tensors[name].shape[0] for name in group) * 8)
        for name in group:
            engine.want(name, (0, 0), tensors[name].shape[:2], at, (8, 2))
            at += tensors[name].shape[0] * 8
    plan = make_plan(trainer.table(), Pieces.of(engine.pieces))
    check(plan, trainer, engine)
    assert (len(plan.reads), plan.wire_bytes) == (10, plan.minimum_bytes)


def test_a_fused_expert_tensor_by_columns_spells_out_the_shorter_loop_only() -> None:
    trainer, engine = laid_out((3, 16, 8), [((0, 0, 0), (3, 16, 8))])
    engine.want("w", (0, 0, 4), (3, 16, 4), engine.room(3 * 200), (200, 8, 2))
    plan = make_plan(trainer.table(), Pieces.of(engine.pieces), cost=NEVER_PULL, verify=False)
    check(plan, trainer, engine)
    assert plan.reads.count.tolist() == [16, 16, 16]


def test_loops_that_continue_each_other_are_one_loop() -> None:
    trainer, engine = laid_out((3, 16, 8), [((0, 0, 0), (3, 16, 8))])
    engine.want("w", (0, 0, 4), (3, 16, 4), engine.room(3 * 128), (128, 8, 2))
    plan = make_plan(trainer.table(), Pieces.of(engine.pieces), cost=NEVER_PULL, verify=False)
    check(plan, trainer, engine)
    assert plan.reads.count.tolist() == [48]


def test_short_runs_are_pulled_and_long_ones_read_exactly_by_cost() -> None:
    trainer, engine = laid_out((64, 512), [((0, 0), (64, 512))])
    engine.want("w", (0, 0), (64, 4), engine.room(64 * 8), (8, 2))
    few = make_plan(trainer.table(), Pieces.of(engine.pieces), cost=CostModel(1 / 3e9, 1e-7), verify=False)
    many = make_plan(trainer.table(), Pieces.of(engine.pieces), cost=CostModel(1 / 3e9, 1e-6), verify=False)
    for plan in (few, many):
        check(plan, trainer, engine)
    assert few.choice == {"exact": 512, "whole": 0}
    assert many.choice == {"exact": 0, "whole": 65536}
    assert few.minimum_bytes == many.minimum_bytes == 512


# -- replicas -----------------------------------------------------------------------------------------------------------------


def replicated(agents: Sequence[Sequence[int]], number: int = 12) -> tuple[Trainer, Engine]:
    tensors = {f"t{n}": tensor((4, 3), seed=n) for n in range(number)}
    trainer, engine = Trainer(tensors, agents=4), Engine(tensors)
    for n, name in enumerate(tensors):
        trainer.hold(name, (0, 0), (4, 3), *agents[n % len(agents)])
        engine.want(name, (0, 0), (4, 3), engine.room(24), (6, 2))
    return trainer, engine


def bytes_by_agent(plan: Plan) -> list[int]:
    return np.bincount(plan.reads.agent, plan.reads.length * plan.reads.count, 4).astype(int).tolist()


@pytest.mark.parametrize(
    ("agents", "preference", "expected"),
    [
        ([(0, 1, 2)], None, [96, 96, 96, 0]),
        ([(0, 2), (1, 3)], None, [72, 72, 72, 72]),
        ([(0, 1, 2)], [1, 0, 0, 0], [0, 144, 144, 0]),
        ([(0, 1, 2)], [-1, 5, 7, 0], [0, 288, 0, 0]),
        ([(0, 1), (3,)], [0, 0, 0, 9], [72, 72, 0, 144]),
    ],
)
def test_equal_holders_share_the_bytes_and_the_preferred_go_first(
    agents: Sequence[Sequence[int]], preference: list[int] | None, expected: list[int]
) -> None:
    trainer, engine = replicated(agents)
    plan = make_plan(trainer.table(), Pieces.of(engine.pieces), preference=preference)
    check(plan, trainer, engine)
    assert bytes_by_agent(plan) == expected


def test_without_the_only_holder_that_may_be_used_the_piece_is_refused() -> None:
    trainer, engine = replicated([(0, 1), (3,)])
    with pytest.raises(CoverageError, match=r"6 piece.*t1\[0:4, 0:3\] \(12 of 12 elements\)"):
        make_plan(trainer.table(), Pieces.of(engine.pieces), preference=[0, 0, 0, -1])


def test_the_same_arguments_give_the_same_plan() -> None:
    trainer, engine = replicated([(0, 1, 2), (1, 3)])
    one, two = (make_plan(trainer.table(), Pieces.of(engine.pieces)) for _ in range(2))
    for name in ("agent", "remote_addr", "local_addr", "shard"):
        assert getattr(one.reads, name).tolist() == getattr(two.reads, name).tolist()


# -- refused ------------------------------------------------------------------------------------------------------------------


def test_tensors_that_nobody_publishes_are_named() -> None:
    trainer, _ = laid_out((4, 2), [((0, 0), (4, 2))])
    pieces = Pieces.of([Piece(f"lost{n}", (0,), (1,), ENGINE, (1,), 1) for n in range(7)])
    with pytest.raises(CoverageError, match=r"7 tensor.*lost0, lost1, lost2, lost3, lost4, …"):
        make_plan(trainer.table(), pieces)


def test_a_box_beyond_the_global_tensor_is_refused_with_what_is_missing() -> None:
    trainer, _ = laid_out((4, 2), [((0, 0), (4, 2))])
    pieces = Pieces.of([Piece("w", (2, 0), (4, 2), ENGINE, (4, 2), 2)])
    with pytest.raises(CoverageError, match=r"w\[2:6, 0:2\] \(4 of 8 elements\)"):
        make_plan(trainer.table(), pieces)


def test_another_element_size_is_refused() -> None:
    trainer, _ = laid_out((4, 2), [((0, 0), (4, 2))])
    with pytest.raises(ManifestMismatch, match="2 bytes an element and wanted with 4"):
        make_plan(trainer.table(), Pieces.of([Piece("w", (0, 0), (4, 2), ENGINE, (8, 4), 4)]))


@pytest.mark.parametrize("shards", [[((0, 0), (4, 2)), ((0, 0), (3, 2))], [((0, 0), (3, 2)), ((1, 0), (3, 2))]])
def test_shards_that_overlap_are_refused(shards: list[Box]) -> None:
    trainer, engine = laid_out((4, 2), shards)
    engine.want("w", (0, 0), (4, 2), engine.room(16), (4, 2))
    with pytest.raises(ManifestMismatch, match=r"overlap|more than once"):
        make_plan(trainer.table(), Pieces.of(engine.pieces))


def test_shards_without_digests_are_refused_when_bytes_must_be_verified_and_planned_otherwise() -> None:
    trainer, engine = laid_out((4, 2), [((0, 0), (4, 2))], blocks=0)
    engine.want("w", (0, 0), (4, 2), engine.room(16), (4, 2))
    with pytest.raises(ConfigError, match=r"w of slot0.*verify=False"):
        make_plan(trainer.table(), Pieces.of(engine.pieces))
    plan = make_plan(trainer.table(), Pieces.of(engine.pieces), verify=False)
    check(plan, trainer, engine)
    assert plan.reads.blocks.tolist() == [0]


@pytest.mark.parametrize("given_to", [{"preference": [0, 0]}, {"preference": [0.5]}, {"pull_bytes": 0}])
def test_arguments_that_cannot_work_are_refused(given_to: dict[str, list[float] | int]) -> None:
    trainer, _ = laid_out((4, 2), [((0, 0), (4, 2))])
    with pytest.raises(ConfigError):
        make_plan(trainer.table(), Pieces.of([]), **given_to)  # type: ignore[arg-type]


@pytest.mark.parametrize("field_name", ["seconds_per_byte", "seconds_per_run", "copy_seconds_per_byte"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_no_figures_are_refused(field_name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field_name):
        replace(CostModel(), **{field_name: value})


def test_no_pieces_and_no_shards_are_an_empty_plan() -> None:
    trainer, _ = laid_out((4, 2), [])
    plan = make_plan(trainer.table(), Pieces.of([]), preference=[])
    assert (len(plan.reads), len(plan.pulls), plan.wire_bytes, plan.descriptors) == (0, 0, 0, 0)
    assert list(plan.batches(1)) == list(plan.reads.expanded(0)) == []


def test_the_columns_of_a_plan_cannot_be_changed() -> None:
    trainer, engine = replicated([(0,)])
    plan = make_plan(trainer.table(), Pieces.of(engine.pieces))
    with pytest.raises(ValueError, match="read-only"):
        plan.reads.local_addr[0] = 1


# -- real tensors -------------------------------------------------------------------------------------------------------------


def test_what_lands_has_the_digests_that_were_published_with_the_shards() -> None:
    rows, columns = 512, 192
    whole = torch.randn(rows, columns, dtype=torch.float32)
    parts = [whole[:256].clone(), whole[256:].clone()]
    tables = [
        ShardTable.from_held([Held("w", (rows, columns), (256 * n, 0), part)], Agent(f"slot{n}", f"agent{n}"), digests=True)
        for n, part in enumerate(parts)
    ]
    table = ShardTable.merged(tables)
    by_rows, by_columns = torch.zeros(rows - 100, columns), torch.zeros(rows, columns // 2)
    pieces = Pieces.of(
        [
            Piece("w", (100, 0), tuple(by_rows.shape), by_rows.data_ptr(), (columns * 4, 4), 4),
            Piece("w", (0, 0), tuple(by_columns.shape), by_columns.data_ptr(), (columns // 2 * 4, 4), 4),
        ]
    )
    plan = make_plan(table, pieces)

    def digests(addr: int, shard: int, first: int, blocks: int, nbytes: int) -> list[int]:
        landed = torch.frombuffer(bytearray(ctypes.string_at(addr, nbytes)), dtype=torch.int8).view(blocks, -1)
        published = table.digests[table.digest_offset[shard] + first :][:blocks]
        assert row_block_digests([landed], [blocks])[0].tolist() == published.tolist()
        return published.tolist()

    seen = []
    reads, pulls, copies = plan.reads, plan.pulls, plan.copies
    for row in range(len(reads)):
        near, nbytes = int(reads.local_addr[row]), int(reads.length[row])
        ctypes.memmove(near, int(reads.remote_addr[row]), nbytes)
        seen += digests(near, int(reads.shard[row]), int(reads.first_block[row]), int(reads.blocks[row]), nbytes)
    for row in range(len(pulls)):
        staged, nbytes = int(pulls.remote_addr[row]), int(pulls.nbytes[row])
        seen += digests(staged, int(pulls.shard[row]), int(pulls.first_block[row]), int(pulls.blocks[row]), nbytes)
    assert set(seen) == set(table.digests.tolist())
    for row in range(len(copies)):
        for run in range(int(copies.count[row])):
            far = int(pulls.remote_addr[copies.pull[row]] + np.uint64(copies.offset[row] + run * copies.remote_stride[row]))
            ctypes.memmove(int(copies.local_addr[row]) + run * int(copies.local_stride[row]), far, int(copies.length[row]))
    assert torch.equal(by_rows, whole[100:])
    assert torch.equal(by_columns, whole[:, : columns // 2])
