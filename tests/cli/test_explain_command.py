"""What `mx explain` promises."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mx_common.directory import DirectoryClient
from mx_common.load.candidates import candidates_of
from mx_common.selection import Target, get_selector
from mx_common.wire import p2p

HERE = json.dumps({"zone": "z1", "rack": "r1"})


@pytest.fixture
def fleet(directory, register):
    """Six sources of one identity that differ in load and place."""
    for number in range(6):
        topology = {"zone": f"z{number % 2}", "rack": f"r{number % 3}"}
        load = None if number == 5 else number / 5
        register(directory.address, f"worker-{number}", load=load, topology=topology)
    return directory.address


def explained(mx, address, *arguments, **variables):
    done = mx("explain", "Org/Model", "--server", address, "--json", *arguments, **variables)
    (group,) = json.loads(done.out)["groups"]
    return group["candidates"]


@pytest.mark.parametrize("policy", ["rendezvous_hash", "load_aware", "topology_aware", "balanced"])
def test_the_order_is_the_one_selection_gives_a_load(mx, fleet, monkeypatch, policy):
    monkeypatch.setenv("MX_P2P_TOPOLOGY", HERE)
    with DirectoryClient(fleet) as client:
        candidates = candidates_of(client.list_sources(status=p2p.SOURCE_STATUS_READY))
    order = get_selector(policy).order(candidates, Target("Org/Model", "target-7", 0))
    shown = explained(mx, fleet, "--worker-id", "target-7", MX_P2P_SOURCE_SELECTOR=policy, MX_P2P_TOPOLOGY=HERE)
    assert [row["worker_id"] for row in shown] == [candidate.worker_id for candidate in order]
    assert [row["place"] for row in shown] == list(range(1, 7))


def test_the_policy_of_the_environment_is_asked_unless_another_is_named(mx, fleet):
    ours = json.loads(mx("explain", "Org/Model", "--server", fleet, "--json", MX_P2P_SOURCE_SELECTOR="load_aware").out)
    other = json.loads(
        mx(
            "explain", "Org/Model", "--server", fleet, "--json", "--selector", "balanced", MX_P2P_SOURCE_SELECTOR="load_aware"
        ).out
    )
    assert (ours["policy"], other["policy"]) == ("load_aware", "balanced")


def test_a_policy_that_does_not_exist_is_wrong_usage_and_the_known_ones_are_listed(mx, fleet):
    done = mx("explain", "Org/Model", "--server", fleet, "--selector", "fastest")
    assert done.code == 64
    assert "rendezvous_hash" in done.err


def test_every_source_that_would_not_be_used_has_its_reason(mx, serve, register):
    now = [0.0]
    server = serve(clock=lambda: now[0])
    source_id = register(server.address, "silent")
    now[0] = 60.0
    with DirectoryClient(server.address) as client:
        client.update_status(source_id, "silent", 0, p2p.SOURCE_STATUS_READY)
    register(server.address, "good", accelerator="cuda")
    register(server.address, "other-rank", rank=3)
    register(server.address, "other-accelerator", accelerator="cpu")
    register(server.address, "starting", status=p2p.SOURCE_STATUS_INITIALIZING)
    register(server.address, "me", accelerator="cuda")
    now[0] = 151.0
    for worker_id, rank in (("good", 0), ("other-rank", 3), ("other-accelerator", 0), ("me", 0)):
        with DirectoryClient(server.address) as client:
            client.update_status(source_id, worker_id, rank, p2p.SOURCE_STATUS_READY)
    dropped = {
        row["worker_id"]: row["dropped"] for row in explained(mx, server.address, "--worker-id", "me", "--accelerator", "cuda")
    }
    assert dropped == {
        "good": None,
        "me": "the target itself",
        "other-rank": "rank 3, wanted 0",
        "other-accelerator": "accelerator cpu, wanted cuda",
        "silent": "status STALE, wanted READY",
        "starting": "status STALE, wanted READY",
    }
    table = mx("explain", "Org/Model", "--server", server.address, "--worker-id", "me", "--accelerator", "cuda").out
    assert "rank 3, wanted 0" in table
    assert "would read from worker good" in table


def test_a_record_that_is_too_old_is_dropped_by_the_directorys_clock(mx, serve, register):
    server = serve(ahead=-3600)
    register(server.address, "fresh")
    (row,) = explained(mx, server.address)
    assert row["dropped"] is None
    done = mx("explain", "Org/Model", "--server", server.address, "--json", MX_P2P_FRESH_SECONDS="0.001")
    (row,) = json.loads(done.out)["groups"][0]["candidates"]
    assert "older than allowed" in row["dropped"]
    assert done.code == 1


def test_a_worker_of_this_host_that_has_ended_is_dropped(mx, directory, environment, register):
    leave_note = "from mx_common.load import lives; lives.remember(lives.Life('crashed'))"
    subprocess.run([sys.executable, "-c", leave_note], env=environment, check=True)
    register(directory.address, "crashed")
    done = mx("explain", "Org/Model", "--server", directory.address)
    assert done.code == 1
    assert "a process of this host that has ended" in " ".join(done.out.split())
    assert "the next replica of it reads from storage" in done.out


def test_a_model_without_sources_ends_with_code_1_and_names_the_models_there_are(mx, fleet):
    done = mx("explain", "Org/Modle", "--server", fleet)
    assert done.code == 1
    assert "no source of Org/Modle: the next replica reads from storage" in done.out
    assert "it has sources of: Org/Model" in done.out


def test_a_piped_explanation_fits_80_columns_with_every_part_of_the_score(mx, fleet):
    out = mx("explain", "Org/Model", "--server", fleet, "--selector", "balanced", MX_P2P_TOPOLOGY=HERE).out
    assert "policy balanced, rank 0, this node's topology: zone=z1 rack=r1" in out
    assert "place  worker    load          hash    depth  tier  score" in out
    assert "0.50 unknown" in out
    assert "\\" not in out
    table = out[out.index("place") : out.index("a replica of")]
    assert max(map(len, table.splitlines())) <= 80


def test_identities_that_cannot_share_weights_are_shown_apart(mx, directory, register):
    register(directory.address, "a")
    register(
        directory.address,
        "b",
        identity={"tensor_parallel_size": 2, "expert_parallel_size": 8, "pipeline_parallel_size": 0, "dtype": "float16"},
    )
    groups = json.loads(mx("explain", "Org/Model", "--json", MX_SERVER_ADDRESS=directory.address).out)["groups"]
    assert sorted(group["identity"] for group in groups) == [
        "vllm 0.32.0, TP1 PP1, bfloat16",
        "vllm 0.32.0, TP2 EP8, float16",
    ]
