"""What `mx top` promises as a command."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from mx_common.directory import Activity, ActivityClient, RefitClient
from mx_common.wire import p2p
from mx_common.wire.rpc import P2P_SERVICE, service_handler
from tests.support.terminal import watched_on_a_terminal

LOAD = Activity("a1", "target-1", "Org/Model", "load", "node-1", sources=("source-1",), bytes_done=1, bytes_total=4, gbps=8.0)


@pytest.fixture
def fleet(directory, register):
    """The address of a directory with a source, a load from it, and a version of another model."""
    register(directory.address, "source-1", load=0.25)
    with ActivityClient(directory.address, timeout=10) as client:
        client.report(LOAD)
    with RefitClient(directory.address, timeout=10) as client:
        client.create_version("Org/Trained", 7, ["rank0", "rank1"], idempotency_key="k")
    return directory.address


def test_once_prints_one_frame_and_ends(mx, fleet):
    done = mx("top", "--once", "--server", fleet)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == f"1 source, 1 load, 0 refits, 8.0 Gbit/s in the directory at {fleet}"
    assert [line.split()[0] for line in lines if line.strip()][1:] == [
        "reader",
        "target-1",
        "version",
        "7",
        "source",
        "source-1",
    ]
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() and line.isascii() and line.isprintable() for line in lines)


def test_json_holds_every_figure(mx, fleet):
    document = json.loads(mx("top", "--once", "--json", "--server", fleet).out)
    assert (document["directory"], document["reachable"], document["error"]) == (fleet, True, None)
    (activity,), (version,), (source,) = document["activities"], document["versions"], document["sources"]
    assert Activity(**{**activity, "sources": tuple(activity["sources"])}) == LOAD
    assert (version["model_name"], version["number"], version["state"]) == ("Org/Trained", 7, "STAGING")
    assert (version["missing"], version["reading"]) == (["rank0", "rank1"], {"readers": 0, "gbps": 0})
    assert (source["worker_id"], source["source_load"], source["reading"]) == ("source-1", 0.25, {"readers": 1, "gbps": 8.0})


def test_a_model_can_be_watched_alone(mx, fleet):
    out = mx("top", "--once", "--server", fleet, "--model", "Org/Trained").out
    assert "0 sources, 0 loads, 0 refits, 0.0 Gbit/s of Org/Trained" in out
    assert "Org/Model" not in out
    assert "Org/Trained" in out.splitlines()[-2] + out.splitlines()[-1]


def test_a_directory_that_is_down_is_named_and_ends_with_code_1(mx, free_port):
    done = mx("top", "--once", "--server", f"127.0.0.1:{free_port}", MX_RPC_TIMEOUT="1")
    assert (done.code, done.out, len(done.err.splitlines())) == (1, "", 1)
    assert f"directory 127.0.0.1:{free_port}" in done.err


def test_wrong_usage_ends_with_code_64(mx):
    assert mx("top", "--interval", "0").code == 64
    for command in (("top",), ("top", "--once"), ("sources", "--watch")):
        done = mx(*command, "--interval", "1e300")
        assert (done.code, "Traceback" in done.err) == (64, False)
        assert "--interval" in done.err
    assert mx("top", "--interval", "nan").code == 64
    assert mx("top", "--server", "somewhere").code == 64


def test_it_survives_a_directory_that_goes_away_and_ends_with_code_130(start_mx, serve, free_port, register):
    server = serve(f"127.0.0.1:{free_port}")
    register(server.address, "source-a")
    top = start_mx("top", "--interval", "0.2", MX_SERVER_ADDRESS=server.address, MX_RPC_TIMEOUT="2")
    seen = top.wait_for("source-a")
    server.stop()
    away = top.wait_for("went away; 1 source, 0 loads, 0 refits, 0.0 Gbit/s as of", after=seen)
    kept = top.wait_for("source-a", after=away)
    register(serve(f"127.0.0.1:{free_port}").address, "source-b")
    back = top.wait_for("it is back after", after=kept)
    top.wait_for("source-b", after=back)
    assert top.end() == 130


class ModelExpress:
    """A server that knows nothing but its own protocol."""

    def ListSources(self, request, context):
        ref = p2p.SourceInstanceRef(mx_source_id="id", worker_id="theirs", model_name="Org/Model", worker_rank=0)
        return p2p.ListSourcesResponse(
            instances=[ref] if request.status_filter in (p2p.SOURCE_STATUS_UNKNOWN, p2p.SOURCE_STATUS_READY) else []
        )


def test_a_modelexpress_server_is_watched_for_what_it_has(mx):
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((service_handler(P2P_SERVICE, ModelExpress()),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    out = mx("top", "--once", "--server", address).out
    document = json.loads(mx("top", "--once", "--json", "--server", address).out)
    server.stop(0).wait(10)
    assert "who reads, and how far, is not known" in out
    assert "theirs" in out
    assert (document["activities"], document["versions"], document["sources"][0]["reading"]) == (None, None, None)


def test_a_terminal_is_never_overfilled_and_gets_its_cursor_back(directory, register, environment, mx_path):
    for number in range(40):
        register(directory.address, f"worker-{number}", load=number / 100)
    command = [mx_path, "top", "--interval", "0.1", "--server", directory.address]
    seen = watched_on_a_terminal(command, environment, until="more sources", columns=90, lines=12)
    assert "and 32 more sources, less busy" in seen
