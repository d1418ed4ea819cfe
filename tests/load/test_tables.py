"""Tables of tensors, their comparison and the plan of reads: functions of values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_common.errors import ConfigError, CoverageError, ManifestMismatch
from mx_common.load import Settings, TensorTable
from mx_common.load.matching import check_coverage, mismatched, plan_reads
from mx_common.wire import p2p


def table(*rows, digests=None):
    """Rows of (name, address, bytes)."""
    names, addresses, sizes = zip(*rows, strict=True) if rows else ((), (), ())
    return TensorTable(
        names=tuple(names),
        addr=np.array(addresses, dtype=np.uint64),
        size=np.array(sizes, dtype=np.uint64),
        device=np.zeros(len(rows), dtype=np.uint64),
        dtype=("torch.bfloat16",) * len(rows),
        layout=("",) * len(rows),
        digest=np.array(digests or [0] * len(rows), dtype=np.uint64),
        has_digest=np.full(len(rows), digests is not None),
    )


def test_reads_pair_tensors_by_name_in_whatever_order_the_source_lists_them():
    reads = plan_reads(table(("b", 900, 20), ("a", 500, 10)), table(("a", 100, 10), ("b", 200, 20)))
    assert reads.local_addr.tolist() == [100, 200]
    assert reads.remote_addr.tolist() == [500, 900]
    assert reads.length.tolist() == [10, 20]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_a_plan_covers_every_byte_of_the_target_once(sizes, rng):
    target, address = [], 1000
    for number, size in enumerate(sizes):
        target.append((f"t{number}", address, size))
        address += size + rng.choice([0, 0, 7])
    source = [(name, 50_000 + place * 100, size) for place, (name, _, size) in enumerate(rng.sample(target, len(target)))]
    mine = table(*target)
    reads = plan_reads(table(*source), mine)
    check_coverage(reads, mine)
    check_coverage(reads.coalesced(), mine)
    written = sorted(
        b
        for start, length in zip(reads.local_addr.tolist(), reads.length.tolist(), strict=True)
        for b in range(start, start + length)
    )
    assert written == sorted(b for _, start, size in target for b in range(start, start + size))


def test_a_plan_that_misses_a_byte_writes_one_twice_or_strays_is_refused():
    mine = table(("a", 100, 10), ("b", 110, 10))
    reads = plan_reads(table(("a", 500, 10), ("b", 900, 10)), mine)
    with pytest.raises(CoverageError, match="writes 19 bytes"):
        check_coverage(replace(reads, length=np.array([10, 9], dtype=np.uint64)), mine)
    with pytest.raises(CoverageError, match="write the same bytes"):
        check_coverage(replace(reads, local_addr=np.array([100, 105], dtype=np.uint64)), mine)
    with pytest.raises(CoverageError):
        check_coverage(replace(reads, local_addr=np.array([100, 111], dtype=np.uint64)), mine)


def test_all_differences_are_named_at_once():
    theirs = table(("a", 1, 10), ("ghost", 50, 4))
    with pytest.raises(ManifestMismatch, match="lacks b; the source has ghost, which the target does not"):
        plan_reads(theirs, table(("a", 1, 10), ("b", 20, 5)))


def test_a_long_list_of_differences_is_cut_and_counted():
    mine = table(*[(f"t{n}", 100 * n, 10) for n in range(1, 10)])
    with pytest.raises(ManifestMismatch, match="lacks t1, t2, t3, t4, t5 and 4 more"):
        plan_reads(table(), mine)


def test_only_published_digests_are_compared():
    source = replace(table(("a", 1, 1), ("b", 2, 1), digests=[7, 8]), has_digest=np.array([True, False]))
    assert mismatched(source, ["b", "a"], [99, 7]) == []
    assert mismatched(source, ["b", "a"], [99, 6]) == ["a"]


def test_a_manifest_comes_back_as_it_was_written():
    tensors = {"w": torch.randn(8, 4).t(), "scale": torch.tensor(2.0), "empty": torch.empty(0)}
    mine = TensorTable.from_torch(tensors, [11, 12])
    manifest = p2p.GetTensorManifestResponse()
    mine.fill(manifest.tensors)
    back = TensorTable.from_descriptors(p2p.GetTensorManifestResponse.FromString(manifest.SerializeToString()).tensors)
    assert back.names == ("w", "scale")
    assert back.layout == ("4x8/1,4", "")
    assert back.dtype == ("torch.float32", "torch.float32")
    assert back.digest.tolist() == [11, 12]
    assert back.digested
    assert back.addr.tolist() == mine.addr.tolist()


def test_a_view_into_another_tensor_and_a_tied_twin_are_listed_once():
    weight = torch.zeros(10, 4)
    mine = TensorTable.from_torch({"head": weight[2:4], "embed": weight, "tied": weight})
    assert mine.names == ("embed",)
    assert mine.total_bytes == 160


def test_tensors_that_overlap_in_part_have_gaps_or_lie_on_two_devices_are_refused_by_name():
    flat = torch.zeros(100)
    with pytest.raises(ValueError, match="b and a overlap in part"):
        TensorTable.from_torch({"a": flat[:60], "b": flat[40:]})
    with pytest.raises(ValueError, match="w: a tensor of shape"):
        TensorTable.from_torch({"w": torch.zeros(4, 4)[:, :2]})
    with pytest.raises(ValueError, match="tensors lie on cpu and meta"):
        TensorTable.from_torch({"a": flat, "b": torch.zeros(4, device="meta")})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"serevr": "x"}, "unknown loader setting 'serevr'; known: server, selector"),
        ({"max_sources": "3"}, "max_sources='3' must be of type int"),
        ({"verify_digest": 1}, "verify_digest=1 must be of type bool"),
        ({"max_sources": 0}, "max_sources=0 must be at least 1"),
        ({"fallback": "disk"}, "fallback='disk' is not one of storage, none"),
        ({"transfer_timeout": -1.0}, "transfer_timeout=-1.0 must be more than 0 seconds"),
        ({"stall_timeout": float("nan")}, "stall_timeout=nan must be more than 0 seconds"),
    ],
)
def test_a_bad_loader_setting_says_what_is_allowed(given, says):
    with pytest.raises(ConfigError) as refused:
        Settings.resolve(given)
    assert says in str(refused.value)


def test_loader_settings_override_the_environment_one_by_one(monkeypatch):
    monkeypatch.setenv("MX_P2P_SOURCE_SELECTOR", "balanced")
    monkeypatch.setenv("MX_TRANSFER_TIMEOUT", "17")
    chosen = Settings.resolve({"selector": "load_aware", "stall_timeout": 5})
    assert (chosen.selector, chosen.transfer_timeout, chosen.stall_timeout) == ("load_aware", 17.0, 5.0)
