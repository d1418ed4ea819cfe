"""What survives the wire, what does not decode, and what tables of several agents merge to."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_common.errors import ManifestMismatch
from mx_common.refit import Agent, ShardTable
from mx_common.refit._codec import CHECKED, MAGIC
from mx_common.refit.table import manifest_digest
from tests.support.shard_tables import fields_equal, make, rows_of, two_by_rows, whole_tables


class TestWire:
    @settings(deadline=None)
    @given(whole_tables())
    def test_a_table_comes_back_as_it_was_and_encodes_to_the_same_bytes(self, table):
        manifest = table.encode()
        back = ShardTable.decode(manifest)
        assert fields_equal(back, table)
        assert back.encode() == manifest
        assert manifest_digest(manifest) == manifest_digest(back.encode())
        assert (back.layout_signature(), back.address_signature()) == (table.layout_signature(), table.address_signature())

    def test_the_extremes_of_a_column_come_back(self):
        table = two_by_rows(
            addr=np.array([1, 2**64 - 64], np.uint64),
            device=np.array([2**64 - 1, 0], np.uint64),
            digest_offset=[0, 2, 2],
            digests=np.array([0, 2**64 - 1], np.uint64),
        )
        assert fields_equal(ShardTable.decode(table.encode()), table)

    @settings(deadline=None)
    @given(whole_tables(), st.data())
    def test_a_flipped_bit_or_a_missing_end_is_a_mismatch(self, table, data):
        manifest = table.encode()
        damaged = bytearray(manifest)
        damaged[data.draw(st.integers(0, len(manifest) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        for bad in (bytes(damaged), manifest[: data.draw(st.integers(0, len(manifest) - 1))], manifest + b"\0"):
            with pytest.raises(ManifestMismatch):
                ShardTable.decode(bad)

    @given(st.binary(max_size=200))
    def test_any_other_bytes_are_a_mismatch(self, noise):
        for bad in (noise, MAGIC + noise, MAGIC + xxhash.xxh3_128_digest(noise) + noise):
            with pytest.raises(ManifestMismatch):
                ShardTable.decode(bad)

    @settings(deadline=None, max_examples=300)
    @given(whole_tables(), st.data())
    def test_damage_under_a_sound_checksum_gives_a_sound_table_or_a_mismatch(self, table, data):
        body = bytearray(table.encode()[CHECKED:])
        for _ in range(data.draw(st.integers(1, 3))):
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        body = bytes(body[: data.draw(st.sampled_from([len(body), len(body) - 1, len(body) // 2]))])
        with contextlib.suppress(ManifestMismatch):
            ShardTable.decode(MAGIC + xxhash.xxh3_128_digest(body) + body)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("tensors", 1 << 50),
            ("shards", 1 << 50),
            ("digests", 1 << 50),
            ("dims", 1 << 50),
            ("tensors", -1),
            ("tensors", True),
            ("names", [1 << 50, 1 << 50]),
            ("names", [0]),
            ("columns", []),
            ("columns", [[3, 0]] * 11),
            ("columns", [[0, 1 << 70]] * 11),
            ("columns", [[0, 0]] * 99),
            ("agents", [["s", "n", "DRAM", 1 << 50, ""]]),
            ("agents", [[1, "n", "DRAM", 0, ""]]),
            ("agents", [["s", "n", "DISK", 0, ""]]),
            ("dtypes", []),
            ("dtypes", [[["x"], 2]]),
        ],
    )
    def test_a_header_that_asks_for_more_than_is_there_is_a_mismatch(self, key, value):
        body = make({"w": ("bfloat16", (8, 4))}, [("w", (0, 0), (8, 4), 0)]).encode()[CHECKED:]
        end = 4 + int.from_bytes(body[:4], "little")
        head = json.dumps({**json.loads(body[4:end]), key: value}).encode()
        forged = len(head).to_bytes(4, "little") + head + body[end:]
        with pytest.raises(ManifestMismatch, match="shard table"):
            ShardTable.decode(MAGIC + xxhash.xxh3_128_digest(forged) + forged)

    def test_a_large_table_is_a_quarter_of_its_json_or_less(self):
        from benchmarks.shard_table import agent_table, json_rows

        table = agent_table(4, 64, 0)
        assert len(table.encode()) * 4 <= len(json.dumps(json_rows(table)))


class TestMerge:
    @settings(deadline=None)
    @given(whole_tables(), st.data())
    def test_tables_of_single_agents_merge_to_the_table_of_all(self, table, data):
        parts = []
        for number, agent in enumerate(table.agents):
            mine = rows_of(table, table.agent == number)
            part = dataclasses.replace(mine, agent=np.zeros(len(mine), np.int32), agents=(agent,))
            held = sorted(set(part.tensor.tolist()))
            if held and data.draw(st.booleans()):  # a rank may list only what it holds
                dims = max(1, int(part.ndim[held].max()))
                place = np.full(len(table.names), -1)
                place[held] = np.arange(len(held))
                part = dataclasses.replace(
                    part,
                    names=tuple(part.names[at] for at in held),
                    dtype=tuple(part.dtype[at] for at in held),
                    **{name: getattr(part, name)[held] for name in ("itemsize", "ndim")},
                    shape=part.shape[held][:, :dims],
                    tensor=place[part.tensor],
                    start=part.start[:, :dims],
                    size=part.size[:, :dims],
                )
            parts.append(part)
        whole = ShardTable.merged(parts)

        def shards(one):
            columns = (one.tensor, one.start, one.size, one.addr, one.agent)
            return {
                (one.names[at], one.dtype[at], *one.shape[at].tolist(), *start, *size, addr, one.agents[agent])
                for at, start, size, addr, agent in zip(*(column.tolist() for column in columns), strict=True)
            }

        assert whole.agents == table.agents
        assert set(whole.names) == set(table.names)
        assert shards(whole) == shards(table)
        whole.check()

    def test_digests_stay_with_their_shards(self):
        def one(n, blocks):
            shards = [("w", (0, 0), (4, 4), 0), ("w", (4, 0), (4, 4), 0)]
            return make({"w": ("bfloat16", (8, 4))}, shards, agents=(Agent(f"s{n}", f"a{n}"),), digest_offset=np.cumsum([0, *blocks]),
                        digests=np.arange(sum(blocks)) + 100 * n)  # fmt: skip

        whole = ShardTable.merged([one(1, [2, 1]), one(2, [0, 4])])
        parts = [whole.digests[a:b].tolist() for a, b in itertools.pairwise(whole.digest_offset.tolist())]
        assert parts == [[100, 101], [102], [], [200, 201, 202, 203]]

    @pytest.mark.parametrize("other", [("float32", (8, 4)), ("bfloat16", (4, 8)), ("bfloat16", (8,)), ("bfloat16", (8, 4, 1))])
    def test_two_ranks_that_disagree_on_a_tensor_are_named_with_it(self, other):
        one = make(
            {"a": ("bfloat16", (2,)), "w": ("bfloat16", (8, 4))}, [("w", (0, 0), (8, 4), 0)], agents=(Agent("tp0", "x"),)
        )
        third = make({"a": ("bfloat16", (2,))}, [("a", (0,), (2,), 0)], agents=(Agent("pp9", "z"),))
        shape = other[1]
        two = make({"w": other, "b": other}, [("w", (0,) * len(shape), shape, 0)], agents=(Agent("tp1", "y"),))
        with pytest.raises(ManifestMismatch, match=r"^w: tp0 publishes it as bfloat16 \[8, 4\] and tp1 publishes it as"):
            ShardTable.merged([third, one, two])

    @pytest.mark.parametrize(
        ("second", "says"),
        [
            (Agent("tp1", "trainer-0"), "slots tp0 and tp1 have the same agent name trainer-0"),
            (Agent("tp0", "trainer-1"), "slot tp0 is published by two agents, trainer-0 and trainer-1"),
        ],
    )
    def test_an_agent_or_slot_that_appears_twice_is_refused(self, second, says):
        tensors, shards = {"w": ("bfloat16", (8, 4))}, [("w", (0, 0), (8, 4), 0)]
        with pytest.raises(ManifestMismatch, match=says):
            ShardTable.merged([make(tensors, shards), make(tensors, shards, agents=(second,))])

    def test_nothing_to_merge_is_refused(self):
        with pytest.raises(ManifestMismatch, match="no shard tables"):
            ShardTable.merged([])
