"""Which of the ranks that hold the same boxes an engine reads from: the order of the configured policy, told by the records."""

from __future__ import annotations

import pytest

from mx_common import selection
from mx_common.refit import Held
from mx_common.selection import Candidate, Target, identity_digest, register_selector
from tests.support.refit_toy import checkpoint

MODEL = "toy/refit"

PATHS = pytest.mark.parametrize("path", ["reshard", "staged"])
SLOTS = ("rank0", "rank1", "rank2")
RECEIVERS = 16


@pytest.fixture
def replicas(trainer, monkeypatch):
    """Publishes version 1 by three ranks, each of which holds every tensor, or those that `held` accepts; policies are read from now."""

    def start(policy, held=lambda rank, name: True):
        monkeypatch.setenv("MX_P2P_SOURCE_SELECTOR", policy)
        source = trainer(3)
        source.publish(1, change=lambda rank, _: [whole(*one) for one in checkpoint(1).items() if held(rank, one[0])])
        return source

    return start


def whole(name, tensor):
    return Held(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def sources(records):
    """Bytes by slot of the last transfer."""
    last = [record for record in records() if "peers" in record][-1]
    return {peer["source"]: peer["wire_bytes"] for peer in last["peers"]}


@PATHS
def test_under_random_equal_replicas_share_the_bytes_evenly(replicas, receive, records, path):
    replicas("random")
    receive(path)[1].update()
    read, sizes = sources(records), [tensor.nbytes for tensor in checkpoint(1).values()]
    assert read.keys() == set(SLOTS)
    assert max(read.values()) - min(read.values()) <= max(sizes), "as even as whole tensors allow"


@pytest.mark.parametrize("policy", ["rendezvous_hash", "load_aware", "topology_aware", "balanced"])
def test_under_any_other_policy_each_engine_reads_from_the_replica_of_its_highest_hash(replicas, receive, records, policy):
    """Trainer ranks publish neither a load nor a place, so that all of these policies come down to the hash."""
    agents = {slot: rank.worker_id for slot, rank in zip(SLOTS, replicas(policy).ranks, strict=True)}
    chosen = set()
    for number in range(RECEIVERS):
        _, receiver = receive(("reshard", "staged")[number % 2])
        done, target = receiver.update(), Target(MODEL, receiver.job.worker_id, 0)
        first = max(SLOTS, key=lambda slot: identity_digest(Candidate(done.uid, agents[slot], 0, MODEL), target))
        assert sources(records) == {first: done.wire_bytes}
        chosen.add(first)
    assert len(chosen) > 1, "different engines read from different replicas"


class LastFirst:
    def order(self, candidates, target):
        return sorted(candidates, key=lambda candidate: candidate.worker_id, reverse=True)


@PATHS
def test_a_policy_of_ones_own_decides_and_what_its_first_lacks_comes_from_the_next(
    replicas, receive, records, path, monkeypatch
):
    monkeypatch.setattr(selection, "_registered", {})
    register_selector("last_first", LastFirst)
    replicas("last_first", held=lambda rank, name: rank < 2 or name.startswith("layers."))
    receive(path)[1].update()
    in_layers = {name.startswith("layers."): 0 for name in checkpoint(1)}
    for name, tensor in checkpoint(1).items():
        in_layers[name.startswith("layers.")] += tensor.nbytes
    assert sources(records) == {"rank2": in_layers[True], "rank1": in_layers[False]}
