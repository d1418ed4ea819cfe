"""What every engine promises of `--load-format mx`, told once: the tests of each engine run these with their own fleet.

    def test_a_replica_without_weight_files_gives_the_tokens_of_transformers(fleet, small_model):
        a_replica_without_weight_files(fleet, small_model, "vllm")

`fleet`: `tests.support.fleet.Fleet`. Real engines; the sources that fail are real sources of other programs.
"""

from __future__ import annotations

import json

from tests.support.fleet import MODEL, START_SECONDS

__all__ = [
    "a_directory_that_is_lost",
    "a_replica_without_weight_files",
    "another_parallel_layout",
    "sources_that_fail",
    "tokens",
    "two_ranks",
]


def tokens(process):
    """The next ones it prints."""
    return json.loads(process.expect("tokens", START_SECONDS))


def a_replica_without_weight_files(fleet, small_model, engine):
    """It has the weights of a running one, and is a source of the same identity from then on; its loader's settings count, not the
    environment's."""
    full, bare, expected = small_model
    source = fleet.engine(full)
    assert tokens(source) == expected
    (first,) = fleet.ready()

    elsewhere = {"MX_SERVER_ADDRESS": "127.0.0.1:1", "MX_P2P_SOURCE_SELECTOR": "load_aware"}
    target = fleet.engine(bare, env=elsewhere, extra={"server": fleet.address, "selector": "rendezvous_hash"})
    assert tokens(target) == expected
    (record,) = fleet.records()
    assert record["source_worker_id"] == first.worker_id
    assert (record["verified"], record["engine"], record["policy"]) == (True, engine, "rendezvous_hash")
    assert len({ref.mx_source_id for ref in fleet.ready(2)}) == 1, "the target has become a source of the same identity"

    source.tell("ask")
    assert tokens(source) == expected, "being read from leaves a source as it was"
    return source, target


def two_ranks(fleet, small_model, answers=None):
    """Each takes the weights of the same rank. `answers`: the tokens of a target of another kind, given its model."""
    full, bare, expected = small_model
    source = fleet.engine(full, tp=2)
    assert tokens(source) == expected
    ranks = {ref.worker_id: ref.worker_rank for ref in fleet.ready(2)}
    assert sorted(ranks.values()) == [0, 1]

    target = answers or (lambda model: tokens(fleet.engine(model, tp=2)))
    assert target(bare) == expected
    records = fleet.records()
    assert sorted(record["rank"] for record in records) == [0, 1]
    for record in records:
        assert ranks[record["source_worker_id"]] == record["rank"]
        assert record["world"] == 2
    fleet.ready(4)


def another_parallel_layout(fleet, small_model):
    """A replica of one rank does not take the weights of two."""
    full, _, expected = small_model
    assert tokens(fleet.engine(full)) == expected
    fleet.ready()
    assert tokens(fleet.engine(full, tp=2)) == expected
    assert fleet.records() == [], "read from storage: identities differ"


def sources_that_fail(fleet, small_model):
    """A source that overwrites what it serves, one that is killed and one that stops while they are read: the same process reads clean
    weights from storage, and without storage it says of each why it did not do."""
    full, bare, expected = small_model
    truth = fleet.engine(full)
    assert tokens(truth) == expected
    fleet.ready()
    faults = {"overwriting": {}, "killed": {"fault": "kill"}, "stopped": {"fault": "stop"}}
    for worker, fault in faults.items():
        spec = {"model": MODEL, "directory": fleet.address, "worker": worker, **fault}
        fleet.start("tests.support.liar", spec, env={"UCX_TLS": "tcp"}).expect("ready")
    truth.end()

    impatient = {"UCX_TLS": "tcp", "MX_TRANSFER_STALL_TIMEOUT": "3", "MX_RPC_TIMEOUT": "3"}
    target = fleet.engine(full, env=impatient, extra={"max_sources": 4})
    assert tokens(target) == expected
    refused = [line for line in target.lines if "did not give the weights" in line]
    assert any("source overwriting did not" in line and "DigestMismatch" in line for line in refused), refused
    assert {worker for worker in faults if any(f"source {worker} did not" in line for line in refused)} == set(faults), refused
    target.end()

    lost = fleet.engine(bare, env=impatient)
    said = lost.failure(START_SECONDS)
    assert f"no weights for {MODEL} rank 0" in said
    assert said.index("DigestMismatch") < said.index("then storage")


def a_directory_that_is_lost(fleet, small_model):
    """Weights come from storage, and the reason names the directory."""
    full, _, expected = small_model
    nobody = "127.0.0.1:1"
    target = fleet.engine(full, env={"MX_SERVER_ADDRESS": nobody, "MX_RPC_TIMEOUT": "2"})
    assert tokens(target) == expected
    (line,) = [line for line in target.lines if f"reading {MODEL} from storage: directory" in line]
    assert nobody in line
