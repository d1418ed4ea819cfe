"""A transfer that is reported: what the directory is told, and that the transfer does not notice."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest

from mx_common._timed import Stages, timed
from mx_common.directory import Activity, ActivityClient, DirectoryServer, Doing, Reporter, activity_reporter
from mx_common.wire import activity as wire
from mx_common.wire.rpc import ACTIVITY_SERVICE, service_handler

LOAD = Activity("a1", "worker-1", "org/model", "load", "node-1")
SOON = 0.02


def reporting():
    return [thread for thread in threading.enumerate() if thread.name == "mx-activity"]


class Peer:
    """A server that counts what it is asked, and answers as `answer` does."""

    def __init__(self, answer):
        self.asked, self._answer = [], answer

    def ReportActivity(self, request, context):
        self.asked.append(request)
        return self._answer(request, context)


@pytest.fixture
def peer():
    """Starts such servers; (the peer, its address)."""
    started = []

    def start(answer):
        implementation = Peer(answer)
        server = grpc.server(ThreadPoolExecutor(2))
        server.add_generic_rpc_handlers((service_handler(ACTIVITY_SERVICE, implementation),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        started.append(server)
        return implementation, f"127.0.0.1:{port}"

    yield start
    for server in started:
        server.stop(0).wait(10)


def taken(request, context):
    return wire.ReportActivityResponse(pause_seconds=SOON)


def unknown(request, context):
    context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such service")


def test_what_is_going_on_is_told_as_it_advances_and_gone_when_it_is_over(server, eventually):
    stages = Stages()
    with ActivityClient(server.address, timeout=10) as client:
        with Reporter(server.address, pause=SOON).doing(LOAD, stages) as doing, timed(stages, "wire"):
            doing.planned(100, ["source-1"])
            hook = doing.reading()
            for done in (40, 100):
                hook(done, 100)
                (told,) = eventually(
                    lambda done=done: [one for one in client.activities() if one.bytes_done == done], f"{done} bytes are told"
                )
                assert (told.stage, told.bytes_total, told.sources) == ("wire", 100, ("source-1",))
                assert told == replace(told, activity_id="a1", worker_id="worker-1", model_name="org/model", host="node-1")
        eventually(lambda: client.activities() == [], "it is forgotten")
    eventually(lambda: not reporting(), "its thread ends")


def test_what_ends_before_its_first_report_is_due_asks_nobody(peer, eventually):
    asked, address = peer(taken)
    reporter = Reporter(address, pause=30)
    for _ in range(20):
        with reporter.doing(LOAD, Stages()) as doing:
            doing.reading()(1, 1)
    eventually(lambda: not reporting(), "their threads end")
    assert asked.asked == []


def test_a_server_that_does_not_know_the_call_is_asked_once(peer, eventually, monkeypatch):
    monkeypatch.setattr(activity_reporter, "ANSWER_SECONDS", 30.0)  # an answer that is late is another case
    asked, address = peer(unknown)
    reporter = Reporter(address, pause=SOON)
    with reporter.doing(LOAD, Stages()):
        eventually(lambda: asked.asked and not reporting(), "it gives up")
    with reporter.doing(LOAD, Stages()):
        assert reporting() == []
    assert len(asked.asked) == 1


def test_a_server_that_is_not_there_costs_the_transfer_nothing_and_is_told_when_it_comes(free_port, eventually):
    address = f"127.0.0.1:{free_port}"
    with Reporter(address, pause=SOON).doing(LOAD, Stages()) as doing:
        doing.planned(100, ["source-1"])
        with DirectoryServer(address), ActivityClient(address, timeout=10) as client:
            eventually(lambda: client.activities(), "it is told")


def test_an_error_of_the_transfer_passes_and_ends_the_report(peer, eventually):
    asked, address = peer(taken)

    def transfer():
        with Reporter(address, pause=SOON).doing(LOAD, Stages()):
            eventually(lambda: asked.asked, "it is told")
            raise KeyError

    with pytest.raises(KeyError):
        transfer()
    eventually(lambda: asked.asked[-1].ended, "its end is told")
    eventually(lambda: not reporting(), "its thread ends")


def test_reads_that_go_on_at_once_add_up():
    doing = Doing(LOAD, Stages())
    one, other = doing.reading(), doing.reading()
    for hook, done in ((one, 10), (other, 5), (one, 30), (other, 5), (other, 8)):
        hook(done, 100)
    assert doing.now().bytes_done == 38


def test_reads_in_many_threads_lose_no_byte():
    doing = Doing(LOAD, Stages())

    def read(_):
        hook = doing.reading()
        for done in range(1, 2001):
            hook(done, 2000)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))
    assert doing.now().bytes_done == 8 * 2000


def test_a_rate_is_that_of_the_last_few_reports(clock):
    doing = Doing(LOAD, Stages(), clock)
    hook, rates = doing.reading(), []
    for gigabytes in (0, 1, 2, 4, 4, 4, 4, 4):
        clock.now += 1
        hook(gigabytes * 10**9, 4 * 10**9)
        rates.append(doing.now().gbps)
    assert rates == [0.0, 4.0, pytest.approx(16 / 3), 8.0, 8.0, 6.0, pytest.approx(4.0), 0.0]
    assert doing.now().seconds == 8


def test_a_version_is_named_once_it_is_known():
    doing = Doing(replace(LOAD, path="staged"), Stages())
    assert doing.now().version is None
    doing.of_version(7, "v7")
    assert (doing.now().version, doing.now().version_id) == (7, "v7")
    doing.planned(9, [f"rank{n}" for n in range(40)])
    assert doing.now().sources == tuple(f"rank{n}" for n in range(16))
