"""A source stays known through everything its directory goes through, and says goodbye when it can."""

from __future__ import annotations

import logging
import signal
import threading

import pytest

from mx_common.directory import DirectoryClient, DirectoryServer, SourcePublisher
from mx_common.errors import ConfigError
from mx_common.wire import p2p

READY, STALE, INITIALIZING = p2p.SOURCE_STATUS_READY, p2p.SOURCE_STATUS_STALE, p2p.SOURCE_STATUS_INITIALIZING


@pytest.fixture
def publish(server, identity):
    """Publishers of the test's own directory that beat quickly; all are stopped at the end."""
    started = []

    def start(worker_id="w", address=None, **options):
        options = {"interval": 0.05, "poll_seconds": 0.02, **options}
        worker = p2p.WorkerMetadata(worker_rank=1)
        started.append(SourcePublisher(identity, worker, worker_id, address=address or server.address, **options).start())
        return started[-1]

    yield start
    for publisher in started:
        publisher.stop()


def status_of(client, worker_id="w"):
    return {i.worker_id: i.status for i in client.list_sources().instances}.get(worker_id)


def test_a_source_is_ready_only_after_its_engine_is(publish, client, eventually):
    engine_up = threading.Event()
    publisher = publish(ready=engine_up.is_set)
    eventually(lambda: status_of(client) == INITIALIZING, "the source is registered")
    assert not publisher.wait_ready(0.2)
    assert client.list_sources(status=READY).instances == ()
    engine_up.set()
    assert publisher.wait_ready(10)
    assert status_of(client) == READY


def test_an_engine_that_never_gets_ready_stays_initializing_and_is_heard_of(publish, client, store, eventually):
    def broken():
        raise RuntimeError("engine exploded")

    publish(ready=broken)
    eventually(lambda: status_of(client) == INITIALIZING, "the source is registered")
    first = client.list_sources().instances[0].updated_at
    eventually(lambda: client.list_sources().instances[0].updated_at > first, "it heartbeats all the same")
    assert status_of(client) == INITIALIZING


def test_each_heartbeat_carries_the_load_read_for_it(publish, client, eventually):
    loads = [0.0]
    publisher = publish(read_load=lambda: loads[0], reads_in_flight=lambda: 3)
    assert publisher.wait_ready(10)
    (listed,) = client.list_sources().instances
    assert (listed.HasField("source_load"), listed.source_load, listed.reads_in_flight) == (True, 0.0, 3)
    loads[0] = 0.75
    eventually(lambda: client.list_sources().instances[0].source_load == 0.75, "the new load is published")
    loads[0] = None
    eventually(lambda: not client.list_sources().instances[0].HasField("source_load"), "no reading is published as none")
    loads[0] = float("nan")
    assert status_of(client) == READY


def test_a_load_that_cannot_be_read_costs_one_warning_and_no_heartbeat(publish, client, caplog, eventually):
    def broken():
        raise OSError("no counters")

    with caplog.at_level(logging.WARNING):
        assert publish(read_load=broken).wait_ready(10)
        first = client.list_sources().instances[0].updated_at
        eventually(lambda: client.list_sources().instances[0].updated_at > first, "another heartbeat")
    assert [r.getMessage() for r in caplog.records if "read_load" in r.getMessage()] == [
        "read_load of worker w failed, and is treated as no answer: no counters"
    ]


def test_the_assigned_id_is_told_before_the_source_can_be_seen_ready(publish, client):
    seen = []

    def told(source_id):
        seen.append((source_id, len(client.list_sources(status=READY).instances)))

    publisher = publish(on_registered=told)
    assert publisher.wait_ready(10)
    assert seen == [(publisher.mx_source_id, 0)]


def test_stopping_marks_the_source_stale_and_ends_its_thread(publish, client):
    publisher = publish()
    assert publisher.wait_ready(10)
    publisher.stop()
    assert status_of(client) == STALE
    assert not [thread for thread in threading.enumerate() if thread.name == "mx-heartbeat"]


def test_a_directory_that_restarts_empty_is_filled_again_with_one_warning(free_port, publish, caplog, eventually):
    address = f"127.0.0.1:{free_port}"
    with caplog.at_level(logging.INFO, logger="mx_common.directory.heartbeat"):
        publisher = publish(address=address)
        assert not publisher.wait_ready(0.5), "the directory is down"
        for outage in (1, 2):
            with DirectoryServer(address), DirectoryClient(address) as client:
                eventually(lambda client=client: status_of(client) == READY, "the source registered and is READY")
                eventually(lambda outage=outage: outages(caplog).count("back") == outage, "the return is logged")
            eventually(lambda outage=outage: outages(caplog).count("down") == outage + 1, "the outage is logged")
    assert outages(caplog) == ["down", "back", "down", "back", "down"]


def outages(caplog):
    """The log's words about the directory, in order."""
    words = {"known to the directory for now": "down", "directory is back": "back"}
    return [word for message in caplog.messages for text, word in words.items() if text in message]


def test_a_directory_that_forgot_the_worker_gets_it_again_in_the_same_beat(publish, store, client, clock, eventually):
    assert publish(interval=0.2).wait_ready(10)
    clock.now += 600
    assert status_of(client) is None
    eventually(lambda: status_of(client) == READY, "the source registered again")


def test_a_directory_in_another_process_that_is_killed_and_restarted_is_filled_again(spawn, eventually):
    server = spawn("serve", "127.0.0.1:0")
    address = server.expect("serving")
    source = spawn("source", "w", address)
    source.expect("ready")
    server.kill()
    source.expect("WARNING worker w is not known to the directory for now")
    spawn("serve", address).expect("serving")
    source.expect("INFO directory is back")
    with DirectoryClient(address) as client:
        eventually(lambda: status_of(client) == READY, "the source is READY again")


@pytest.mark.parametrize(("role", "status"), [("source", -signal.SIGTERM), ("source_with_handler", 7)])
def test_sigterm_marks_a_source_stale_and_the_hosts_handling_still_happens(spawn, server, client, role, status):
    source = spawn(role, "w", server.address)
    source.expect("ready")
    assert status_of(client) == READY
    assert source.kill(signal.SIGTERM) == status
    assert status_of(client) == STALE
    if role == "source_with_handler":
        assert "host handled 15" in source.rest()


def test_a_normal_exit_marks_a_source_stale(spawn, server, client):
    source = spawn("source", "w", server.address)
    source.expect("ready")
    source.popen.stdin.close()
    assert source.popen.wait(30) == 0
    assert status_of(client) == STALE


def test_the_exit_of_a_multiprocessing_child_marks_its_source_stale(spawn, server, client):
    parent = spawn("source_in_multiprocessing_child", "w", server.address)
    assert parent.expect("child ended") == "0"
    assert status_of(client) == STALE


def test_a_source_started_outside_the_main_thread_touches_no_signal_handler(spawn, server, client, eventually):
    source = spawn("source_in_thread", "w", server.address)
    assert source.expect("started; handler is default:") == "True"
    eventually(lambda: status_of(client) == READY, "it publishes all the same")
    assert source.kill(signal.SIGTERM) == -signal.SIGTERM


def test_an_earlier_handler_is_back_after_stop(publish, server):
    before = signal.getsignal(signal.SIGTERM)
    publisher = publish()
    assert signal.getsignal(signal.SIGTERM) != before
    publisher.stop()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_source_killed_between_registration_and_ready_is_never_listed_as_ready(spawn, eventually):
    address = spawn("serve", "127.0.0.1:0", 1).expect("serving")
    source = spawn("source", "w", address, 0.1, "never")
    source.expect("started")
    with DirectoryClient(address) as client:
        eventually(lambda: status_of(client) == INITIALIZING, "the source is registered")
        source.kill()
        eventually(lambda: status_of(client) == STALE, "the reaper called it STALE")
        assert client.list_sources(status=READY).instances == ()


def test_a_stopped_source_turns_stale_and_comes_back_when_it_goes_on(spawn, eventually):
    address = spawn("serve", "127.0.0.1:0", 1).expect("serving")
    source = spawn("source", "w", address)
    source.expect("ready")
    with DirectoryClient(address) as client:
        source.popen.send_signal(signal.SIGSTOP)
        eventually(lambda: status_of(client) == STALE, "a silent source is STALE")
        source.popen.send_signal(signal.SIGCONT)
        eventually(lambda: status_of(client) == READY, "it is READY again")


def test_a_heartbeat_without_a_pause_is_refused(identity):
    with pytest.raises(ConfigError, match="a heartbeat every 0 s"):
        SourcePublisher(identity, p2p.WorkerMetadata(), "w", interval=0)


def test_a_source_whose_engine_stops_serving_is_stale_until_it_serves_again(publish, client, eventually):
    able = threading.Event()
    able.set()
    assert publish(ready=able.is_set).wait_ready(10)
    able.clear()
    eventually(lambda: status_of(client) == STALE, "STALE while the engine cannot serve")
    able.set()
    eventually(lambda: status_of(client) == READY, "READY again")
