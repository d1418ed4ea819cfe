"""What `mx sources` promises."""

from __future__ import annotations

import json
import re

from mx_common.wire import p2p
from tests.support.terminal import watched_on_a_terminal


def test_every_source_is_listed_with_model_rank_status_load_topology_age_and_worker(mx, directory, register):
    register(directory.address, "worker-a", load=0.25, topology={"zone": "z1", "rack": "r2"})
    register(directory.address, "worker-b", rank=1, status=p2p.SOURCE_STATUS_INITIALIZING)
    done = mx("sources", "--server", directory.address)
    assert (done.code, done.err) == (0, "")
    headline, headings, *rows = done.out.splitlines()
    first, second = (re.sub(r"\b\d+ s\b", "AGE", row) for row in rows)
    assert headline == f"2 sources in the directory at {directory.address}"
    assert headings.split() == ["model", "rank", "status", "load", "topology", "age", "worker"]
    assert first.split() == ["Org/Model", "0", "READY", "0.25", "zone=z1", "rack=r2", "AGE", "worker-a"]
    assert second.split() == ["Org/Model", "1", "INITIALIZING", "unknown", "AGE", "worker-b"]


def test_a_piped_table_fits_80_columns_and_holds_nothing_but_text(mx, directory, register):
    model = "organisation/a-model-with-a-name-that-is-much-longer-than-any-column-may-be-405B-instruct"
    register(
        directory.address,
        "0123456789abcdef",
        identity={"model_name": model},
        load=0.5,
        topology={"region": "us-east-1", "rack": "row-17-rack-4"},
    )
    out = mx("sources", "--server", directory.address).out
    assert max(map(len, out.splitlines())) <= 80
    assert all(line == line.rstrip() and line.isascii() and line.isprintable() for line in out.splitlines())


def test_markup_and_control_characters_in_names_are_shown_and_break_nothing(mx, directory, register):
    register(directory.address, "w", identity={"model_name": "[red]m[/nope]:smile:\x1b[2J"}, topology={"rack": "[bold]r1\n"})
    done = mx("sources", "--server", directory.address, COLUMNS="150")
    assert done.code == 0
    assert "[red]m[/nope]:smile:\\x1b[2J" in done.out
    assert "rack=[bold]r1\\n" in done.out
    assert "\x1b" not in done.out


def test_a_name_the_terminal_cannot_encode_does_not_end_the_report(mx, directory, register):
    register(directory.address, "w", identity={"model_name": "模型"})
    done = mx("sources", "--server", directory.address, PYTHONIOENCODING="latin-1")
    assert done.code == 0
    assert "\\u6a21\\u578b" in done.out


def test_ages_go_by_the_directorys_clock_when_ours_is_an_hour_off(mx, serve, register):
    server = serve(ahead=3600)
    register(server.address, "w")
    (source,) = json.loads(mx("sources", "--server", server.address, "--json").out)["sources"]
    assert 0 <= source["age_s"] < 1800


def test_json_says_the_same_as_the_table_with_everything_it_leaves_out(mx, directory, register):
    source_id = register(directory.address, "worker-a", load=0.0, accelerator="cuda", topology={"rack": "r1"})
    document = json.loads(mx("sources", "--json", MX_SERVER_ADDRESS=directory.address).out)
    (source,) = document.pop("sources")
    age = source.pop("age_s")
    assert document == {"directory": directory.address, "reachable": True, "error": None}
    assert 0 <= age < 1800
    assert source == {
        "model": "Org/Model",
        "rank": 0,
        "status": "READY",
        "source_load": 0.0,
        "topology": {"rack": "r1"},
        "readers": None,
        "accelerator": "cuda",
        "worker_id": "worker-a",
        "ended": False,
        "mx_source_id": source_id,
    }


def test_a_model_can_be_asked_for_alone(mx, directory, register):
    register(directory.address, "a", identity={"model_name": "Org/One"})
    register(directory.address, "b", identity={"model_name": "Org/Two"})
    out = mx("sources", "--server", directory.address, "--model", "Org/Two").out
    assert "1 source of Org/Two" in out
    assert "Org/One" not in out


def test_a_silent_source_is_shown_as_stale(mx, serve, register):
    now = [0.0]
    server = serve(clock=lambda: now[0])
    register(server.address, "w")
    now[0] = 100.0
    (source,) = json.loads(mx("sources", "--server", server.address, "--json").out)["sources"]
    assert source["status"] == "STALE"


def test_a_configured_directory_that_is_down_is_named_and_ends_with_code_1(mx, free_port):
    done = mx("sources", MX_SERVER_ADDRESS=f"127.0.0.1:{free_port}", MX_RPC_TIMEOUT="1")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("mx: ")
    assert f"directory 127.0.0.1:{free_port}" in done.err
    assert len(done.err.splitlines()) == 1


def test_an_embedded_directory_that_nobody_hosts_is_explained(mx, free_port):
    done = mx("sources", MX_EMBEDDED_ADDRESS=f"127.0.0.1:{free_port}", MX_RPC_TIMEOUT="1")
    assert done.code == 1
    assert f"no directory on 127.0.0.1:{free_port}: no replica" in done.err
    assert "MX_SERVER_ADDRESS" in done.err


def test_a_malformed_address_in_the_environment_names_its_variable(mx):
    done = mx("sources", MX_SERVER_ADDRESS="somewhere")
    assert done.code == 1
    assert "MX_SERVER_ADDRESS='somewhere'" in done.err


def test_a_malformed_address_on_the_command_line_is_wrong_usage(mx):
    done = mx("sources", "--server", "somewhere")
    assert done.code == 64
    assert "host:port" in done.err


def test_a_watch_keeps_its_table_while_the_directory_is_away_and_says_when_it_is_back(start_mx, serve, free_port, register):
    server = serve(f"127.0.0.1:{free_port}")
    register(server.address, "worker-a")
    watch = start_mx("sources", "--watch", "--interval", "0.2", MX_SERVER_ADDRESS=server.address, MX_RPC_TIMEOUT="2")
    seen = watch.wait_for("worker-a")
    server.stop()
    away = watch.wait_for("went away; 1 source as of", after=seen)
    kept = watch.wait_for("worker-a", after=away)
    register(serve(f"127.0.0.1:{free_port}").address, "worker-b")
    back = watch.wait_for("it is back after", after=kept)
    watch.wait_for("worker-b", after=back)
    assert watch.end() == 130


def test_a_watch_waits_for_a_directory_that_is_not_there_yet(start_mx, serve, free_port, register):
    watch = start_mx(
        "sources", "--watch", "--json", "--interval", "0.2", MX_SERVER_ADDRESS=f"127.0.0.1:{free_port}", MX_RPC_TIMEOUT="0.5"
    )
    waiting = watch.wait_for('"reachable": false')
    register(serve(f"127.0.0.1:{free_port}").address, "worker-a")
    there = watch.wait_for("worker-a", after=waiting)
    documents = [json.loads(watch.lines[number]) for number in (waiting, there)]
    assert [(d["reachable"], len(d["sources"])) for d in documents] == [(False, 0), (True, 1)]
    assert f"127.0.0.1:{free_port}" in documents[0]["error"]


def test_on_a_terminal_the_table_is_drawn_in_place_and_the_cursor_comes_back_when_the_watch_is_ended(
    directory, register, environment, mx_path
):
    register(directory.address, "worker-a", identity={"model_name": "[red]m"})
    command = [mx_path, "sources", "--watch", "--interval", "0.1", "--server", directory.address]
    seen = watched_on_a_terminal(command, environment, until="worker-a", columns=100)
    assert "[red]m" in seen
    assert "┌" in seen
