"""All processes of a host show their numbers under one port, whoever of them lives or dies. Real processes, real sockets."""

from __future__ import annotations

import os
import signal
import socket
import stat
import urllib.request

import pytest

from tests.support.process import Process
from tests.support.scrape import scrape

ATTEMPTS = "mx_load_attempts_total"


@pytest.fixture
def start(tmp_path, free_port):
    """Starts processes that count; they share the port, and the folder."""
    made = []
    runtime = tmp_path / ("deep" * 30)  # longer than the name of a socket may be

    def one(rank, **env):
        variables = {"MX_METRICS_PORT": str(free_port), "MX_METRICS_HOST": "127.0.0.1", "MX_RUNTIME_DIR": str(runtime), **env}
        made.append(Process("-m", "tests.support.metrics_child", rank, env=variables, group=True))
        made[-1].expect("started")
        return made[-1]

    one.folder = runtime / f"metrics-{free_port}"
    yield one
    for process in made:
        process.end()


def told(process, command):
    process.tell(command)
    return process.expect(command.split()[0])


def counted(process, number):
    told(process, f"count {number}")


def test_two_ranks_share_a_port_and_are_told_apart(start, free_port):
    for rank in (0, 1):
        counted(start(rank), rank + 1)
    page = scrape(free_port, lambda page: len(page.processes()) == 2)
    assert sorted(page.processes().values()) == ["0", "1"]
    assert [page.value(ATTEMPTS, outcome="ok", rank=rank) for rank in "01"] == [1, 2]


def test_processes_of_one_rank_give_no_series_twice(start, free_port):
    for number in (1, 10, 100):
        counted(start(0), number)
    page = scrape(free_port, lambda page: len(page.processes()) == 3)  # refuses duplicates
    assert page.value(ATTEMPTS, outcome="ok") == 111


def test_when_the_process_that_serves_is_killed_another_takes_over_and_its_numbers_go(start, free_port):
    first = start(0)
    scrape(free_port)  # it has the page
    second = start(1)
    counted(second, 5)
    assert scrape(free_port, lambda page: len(page.processes()) == 2)
    first.signal(signal.SIGKILL)
    page = scrape(free_port, lambda page: set(page.processes().values()) == {"1"})
    assert page.value(ATTEMPTS, outcome="ok") == 5
    # the number of the dead is given again, so there are never more than processes
    counted(start(7), 3)
    page = scrape(free_port, lambda page: len(page.processes()) == 2)
    assert page.processes() == {"0": "7", "1": "1"}
    assert page.value(ATTEMPTS, outcome="ok", process="0") == 3


def test_the_socket_of_a_dead_process_is_removed(start, free_port):
    start(0)
    scrape(free_port)
    second = start(1)
    scrape(free_port, lambda page: len(page.processes()) == 2)
    assert sorted(path.name for path in start.folder.glob("*.sock")) == ["0.sock", "1.sock"]
    second.signal(signal.SIGKILL)
    scrape(free_port, lambda page: len(page.processes()) == 1 and not (start.folder / "1.sock").exists())


def test_a_stopped_process_and_a_stranger_on_a_socket_cost_only_their_own_numbers(start, free_port):
    counted(start(0), 1)
    scrape(free_port)
    stopped = start(1)
    scrape(free_port, lambda page: len(page.processes()) == 2)
    stopped.signal(signal.SIGSTOP)
    folder = os.open(start.folder, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.bind(f"/proc/self/fd/{folder}/9.sock")
        stranger.listen()  # and never answers
        assert scrape(free_port).processes() == {"0": "0"}
    os.close(folder)
    stopped.signal(signal.SIGCONT)
    scrape(free_port, lambda page: len(page.processes()) == 2)


def test_only_this_user_reaches_what_processes_show(start, free_port):
    start(0)
    scrape(free_port)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [start.folder, *start.folder.iterdir()]}
    assert modes.pop(start.folder.name) == 0o700
    assert set(modes) == {"0.sock", "0.lock", "page.lock"}
    assert set(modes.values()) == {0o600}


def test_a_forked_child_counts_from_0_under_a_number_of_its_own_and_keeps_nothing_of_its_parent_alive(start, free_port):
    parent = start(0)
    counted(parent, 5)
    scrape(free_port)
    other = start(1)
    child = int(told(parent, "fork"))
    page = scrape(free_port, lambda page: len(page.processes()) == 3)
    assert page.value(ATTEMPTS, outcome="ok", rank="9") == 100
    assert page.value(ATTEMPTS, outcome="ok", rank="0") == 5
    # the parent ends, the child lives: the port, the page and the number are free all the same
    parent.popen.kill()
    counted(other, 2)
    page = scrape(free_port, lambda page: set(page.processes().values()) == {"1", "9"})
    assert page.value(ATTEMPTS, outcome="ok", rank="1") == 2
    os.kill(child, signal.SIGKILL)


def test_a_stranger_on_the_port_is_one_warning_and_stops_nothing(start, free_port):
    with socket.create_server(("127.0.0.1", free_port)):
        process = start(0)
        line = process.expect("WARNING")
        assert f"127.0.0.1:{free_port} cannot be bound" in line
        assert "set MX_METRICS_PORT to a free port in every process of this host" in line
        assert "MX_METRICS_HOST" in line
        counted(process, 1)
        told(process, "serve")
    assert process.said().count("WARNING") == 1


@pytest.mark.parametrize("value", ["0", "65536", "http", "-1"])
def test_a_port_that_is_none_is_one_warning_and_no_page(start, value):
    process = start(0, MX_METRICS_PORT=value)
    told(process, "serve")
    assert told(process, "threads") == "False"
    (line,) = [line for line in process.lines if line.startswith("WARNING")]
    assert line.startswith(f"WARNING MX_METRICS_PORT='{value}' is")
    assert not start.folder.exists()


def test_without_a_port_there_is_no_thread_no_file_and_no_prometheus_client(start):
    process = start(0, MX_METRICS_PORT="")
    counted(process, 1000)
    assert told(process, "threads") == "False"
    assert not start.folder.parent.exists()


def test_an_address_that_cannot_be_bound_and_a_folder_that_cannot_be_made_stop_nothing(start, tmp_path):
    away = start(0, MX_METRICS_HOST="192.0.2.1")
    line = away.expect("WARNING")
    assert "192.0.2.1" in line
    assert "set MX_METRICS_HOST, where it is given, to an address of this host" in line
    counted(away, 1)
    (tmp_path / "file").write_text("")
    nowhere = start(0, MX_RUNTIME_DIR=str(tmp_path / "file"))
    counted(nowhere, 1)
    (line,) = [line for line in nowhere.said().splitlines() if "metrics of this process are not served" in line]
    assert str(tmp_path / "file") in line
    assert "set MX_RUNTIME_DIR to a directory of yours, the same in every process of this host" in line


def test_while_the_process_that_serves_is_stopped_the_host_has_no_page_and_it_is_back_when_that_goes_on_or_ends(
    start, free_port
):
    first = start(0)
    scrape(free_port)
    start(1)
    scrape(free_port, lambda page: len(page.processes()) == 2)
    first.signal(signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=1)
    first.signal(signal.SIGCONT)
    assert len(scrape(free_port).processes()) == 2
    first.signal(signal.SIGSTOP)
    first.signal(signal.SIGKILL)
    assert scrape(free_port, lambda page: len(page.processes()) == 1).processes() == {"1": "1"}


def test_an_engine_that_shares_its_own_metrics_over_files_finds_none_of_ours_there(start, free_port, tmp_path):
    folder = tmp_path / "of-the-engine"
    folder.mkdir()
    counted(start(0, PROMETHEUS_MULTIPROC_DIR=str(folder)), 3)
    assert scrape(free_port).value(ATTEMPTS, outcome="ok") == 3
    assert list(folder.iterdir()) == []
