"""Promises of the shard table: what it takes from a trainer, what it refuses, and what its signatures tell apart."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mx_common.errors import ConfigError, ManifestMismatch
from mx_common.load.digest import tensor_digest
from mx_common.refit import Agent, Held, ShardTable
from mx_common.refit.table import row_block_digests, row_blocks
from tests.support.shard_tables import agents, fields_equal, make, two_by_rows

KIB64 = 64 << 10


class TestFromHeld:
    def test_each_held_box_becomes_a_shard_at_its_address(self):
        matrix, scalar = torch.ones(4, 6, dtype=torch.bfloat16), torch.tensor(1.0)
        held = [Held("m", (8, 6), (4, 0), matrix), Held("s", (), (), scalar)]
        table = ShardTable.from_held(held, Agent("tp1", "a", b"meta"), digests=False)
        assert (table.names, table.dtype, table.itemsize.tolist()) == (("m", "s"), ("bfloat16", "float32"), [2, 4])
        assert (table.shape.tolist(), table.ndim.tolist()) == ([[8, 6], [1, 1]], [2, 0])
        assert (table.start.tolist(), table.size.tolist()) == ([[4, 0], [0, 0]], [[4, 6], [1, 1]])
        assert table.addr.tolist() == [matrix.data_ptr(), scalar.data_ptr()]
        assert (table.nbytes.tolist(), table.nbytes.dtype, table.total_bytes, len(table)) == ([48, 4], np.uint64, 52, 2)
        assert table.digest_offset.tolist() == [0, 0, 0]

    def test_shards_without_elements_are_left_out(self):
        held = [Held("a", (8, 4), (8, 0), torch.ones(0, 4)), Held("b", (2,), (0,), torch.ones(2))]
        table = ShardTable.from_held(held, Agent("s", "a"), digests=True)
        assert (table.names, len(table), len(table.digests)) == (("b",), 1, 1)

    def test_a_rank_that_holds_nothing_has_an_empty_table_which_travels(self):
        table = ShardTable.from_held([], Agent("s", "a"), digests=True)
        assert (len(table), table.total_bytes) == (0, 0)
        assert fields_equal(ShardTable.decode(table.encode()), table)
        assert fields_equal(
            ShardTable.merged([table, two_by_rows()]),
            dataclasses.replace(two_by_rows(), agent=[1, 2], agents=(*table.agents, *agents(2))),
        )

    def test_two_boxes_of_one_tensor_are_two_shards(self):
        held = [Held("a", (8,), (0,), torch.ones(2)), Held("a", (8,), (6,), torch.ones(2))]
        table = ShardTable.from_held(held, Agent("s", "a"), digests=False)
        assert (table.names, table.tensor.tolist(), table.start.tolist()) == (("a",), [0, 0], [[0], [6]])

    @pytest.mark.parametrize("second", [torch.ones(2, dtype=torch.float64), torch.ones(2, 1)])
    def test_one_name_with_two_dtypes_or_shapes_is_refused_by_name(self, second):
        held = [Held("a.weight", (2,), (0,), torch.ones(2)), Held("a.weight", tuple(second.shape), (0,) * second.dim(), second)]
        with pytest.raises(ManifestMismatch, match=r"tp3 holds a\.weight as torch\.float32 \(2,\) and as"):
            ShardTable.from_held(held, Agent("tp3", "a"), digests=False)

    def test_memory_of_another_kind_than_the_agents_is_refused(self):
        with pytest.raises(ConfigError, match="a lies on cpu, agent n serves VRAM"):
            ShardTable.from_held([Held("a", (2,), (0,), torch.ones(2))], Agent("s", "n", mem="VRAM"), digests=False)


class TestRowBlocks:
    @pytest.mark.parametrize(
        ("rows", "nbytes", "blocks"),
        [
            (8, 8 * KIB64, 8),
            (8, 8 * KIB64 - 16384, 4),
            (8, 8 * KIB64 - 8, 1),
            (8, 2 * KIB64, 2),
            (8, KIB64, 1),
            (8, 1, 1),
            (12, 1 << 30, 4),
            (6, 1 << 30, 2),
            (7, 1 << 30, 1),
            (1, 1 << 30, 1),
            (151936, 1 << 30, 8),
        ],
    )
    def test_the_most_blocks_that_divide_the_rows_and_hold_64_kib_of_whole_digest_rows(self, rows, nbytes, blocks):
        assert row_blocks(rows, nbytes) == blocks

    def test_each_block_has_the_digest_of_its_rows(self):
        tensor = torch.randn(8, 3, 5)
        for blocks in (1, 2, 4, 8):
            assert row_block_digests([tensor], [blocks])[0].tolist() == [tensor_digest(part) for part in tensor.chunk(blocks)]
        assert row_block_digests([torch.tensor(2.0)], [1])[0].tolist() == [tensor_digest(torch.tensor(2.0))]

    @pytest.mark.parametrize("blocks", [0, 3, 16])
    def test_blocks_that_do_not_divide_the_rows_are_refused(self, blocks):
        with pytest.raises(ConfigError, match="8 rows do not divide"):
            row_block_digests([torch.ones(8)], [blocks])

    def test_a_changed_row_changes_the_digest_of_its_block_alone(self):
        tensor = torch.zeros(8, KIB64 // 4)
        held = [Held("small", (2,), (0,), torch.ones(2)), Held("w", (8, KIB64 // 4), (0, 0), tensor)]
        before = ShardTable.from_held(held, Agent("s", "a"), digests=True)
        assert before.digest_offset.tolist() == [0, 1, 9]
        tensor[5, 3] = 1
        after = before.with_digests(held)
        assert np.flatnonzero(before.digests != after.digests).tolist() == [1 + 5]
        assert before.layout_signature() == after.layout_signature()

    def test_digests_of_other_tensors_are_refused(self):
        held = [Held("w", (2,), (0,), torch.ones(2))]
        table = ShardTable.from_held(held, Agent("s", "a"), digests=False)
        with pytest.raises(ConfigError, match="the held tensors are others"):
            table.with_digests([*held, *held])


class TestRules:
    @pytest.mark.parametrize(
        ("changed", "says"),
        [
            (
                {"names": ("w", "w"), "dtype": ("bfloat16",) * 2, "itemsize": [2, 2], "shape": [[8, 4]] * 2, "ndim": [2, 2]},
                "w is listed twice",
            ),
            ({"names": ("",)}, "name is empty"),
            ({"names": ("a\nb",)}, "line break"),
            ({"names": ("\ud800",)}, "not valid Unicode"),
            ({"dtype": ()}, "dtype has 0 entries for 1 tensors"),
            ({"dtype": ("",)}, "without a dtype"),
            ({"itemsize": [0]}, "another item size"),
            ({"itemsize": [2.0]}, "whole numbers"),
            ({"shape": [[8, 4, 1]]}, "shape has shape"),
            ({"shape": [[-8, 4]]}, "negative dim"),
            ({"shape": [[1 << 60, 4]]}, "larger than any memory"),
            ({"ndim": [1]}, "needs? "),
            ({"tensor": [0, 1]}, "tensor has values from 0 to 1; there are 1 tensors"),
            ({"tensor": [0, 1 << 40]}, "which int32 does not hold"),
            ({"agent": [0, -1]}, "agent has values from -1"),
            ({"start": [[0, 0], [5, 0]]}, r"shard 1 of tp1, w \[8, 4\], box \[5:9, 0:4\] is empty or does not lie inside"),
            ({"start": [[0, 0], [-1, 0]]}, "does not lie inside"),
            ({"start": [[0, 0], [(1 << 63) - 1, 0]]}, "does not lie inside"),
            ({"size": [[0, 4], [4, 4]]}, "is empty"),
            ({"addr": [0, 1]}, "shard 0 of tp0.*lies at address 0"),
            ({"addr": np.array([1, (1 << 64) - 4], np.uint64)}, "runs past the end of the address space"),
            ({"device": [0, -1]}, "which uint64 does not hold"),
            ({"device": [0]}, "device has shape"),
            ({"agents": (Agent("a", "x"), Agent("b", "x"))}, "two agents of a shard table have the same name: x, x"),
            ({"agents": (Agent("a", "x"), Agent("a", "y"))}, "the same slot: a, a"),
            ({"digest_offset": [0, 1, 2]}, "digest offsets run from 0 to 2 over 0 digests"),
            ({"digest_offset": [0, 2, 1], "digests": [7]}, "digest offsets"),
            ({"digest_offset": [0, 3, 3], "digests": [1, 2, 3]}, "has 4 rows and 3 digests"),
        ],
    )
    def test_columns_that_do_not_fit_together_are_refused(self, changed, says):
        with pytest.raises(ConfigError, match=says):
            two_by_rows(**changed)

    def test_a_tensor_wider_than_its_rank_is_refused(self):
        tensors = {"v": ("bfloat16", (8,)), "w": ("bfloat16", (8, 4))}
        with pytest.raises(ConfigError, match=r"v .* is not padded with 1"):
            make(tensors, [], shape=[[8, 2], [8, 4]])

    @pytest.mark.parametrize(
        ("fields", "says"),
        [(("", "n"), "needs a slot"), (("s", ""), "needs a slot"), (("s", "n", b"", "DISK"), "known: DRAM, VRAM")],
    )
    def test_an_agent_without_slot_name_or_known_memory_is_refused(self, fields, says):
        with pytest.raises(ConfigError, match=says):
            Agent(*fields)

    def test_columns_are_read_only_and_not_the_callers(self):
        addr = np.array([1 << 40, 2 << 40])
        table = two_by_rows(addr=addr)
        addr[0] = 7
        assert table.addr[0] == 1 << 40
        assert not any(
            column.flags.writeable
            for column in vars(table).values()
            if isinstance(column, np.ndarray) and column is not table.nbytes
        )


class TestSignatures:
    def test_a_restart_in_the_same_layout_changes_addresses_and_not_the_layout(self):
        one = two_by_rows()
        two = two_by_rows(
            addr=one.addr + np.uint64(4096), agents=tuple(Agent(a.slot, a.name + "-again", b"new") for a in one.agents)
        )
        assert one.layout_signature() == two.layout_signature()
        assert one.address_signature() != two.address_signature()

    def test_new_metadata_of_the_same_agents_changes_neither(self):
        one = two_by_rows()
        two = two_by_rows(agents=tuple(dataclasses.replace(agent, metadata=b"new") for agent in one.agents))
        assert (one.layout_signature(), one.address_signature()) == (two.layout_signature(), two.address_signature())

    def test_every_other_difference_changes_the_layout(self):
        whole = [("w", (0, 0), (8, 4), 0)]
        tables = [
            two_by_rows(),
            two_by_rows(agent=[1, 0]),
            two_by_rows(agents=(Agent("pp0", "trainer-0"), Agent("pp1", "trainer-1"))),
            two_by_rows(agents=(Agent("tp0", "trainer-0"), Agent("tp1", "trainer-1", mem="VRAM"))),
            make({"w": ("bfloat16", (8, 4))}, whole, count=2),
            make({"w": ("bfloat16", (8, 4))}, whole),
            make({"v": ("bfloat16", (8, 4))}, [("v", *whole[0][1:])]),
            make({"w": ("float32", (8, 4))}, whole),
            make({"w": ("bfloat16", (8, 8))}, whole),
            make({"w": ("bfloat16", (8, 4, 1))}, [("w", (0, 0, 0), (8, 4, 1), 0)]),
        ]
        assert len({table.layout_signature() for table in tables}) == len(tables)
        assert two_by_rows(device=[0, 1]).address_signature() != two_by_rows().address_signature()
