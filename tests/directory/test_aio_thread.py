"""The thread that a process's gRPC servers share: what fails in it, or is ended from within it, leaves neither a server nor a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from mx_common.directory import ManifestServer, _aio_thread, _rank_server
from mx_common.directory._aio_thread import NAME, join, leave
from mx_common.errors import DirectoryUnavailable


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


async def failing():
    raise ValueError("the server cannot end")


async def nothing():
    pass


def test_a_server_that_fails_to_end_is_not_counted_any_more():
    thread = join()
    leave(thread, failing(), seconds=10)
    assert thread.servers == 0
    assert _aio_thread._current is None
    assert not threads()


def test_a_server_that_is_dropped_in_the_thread_itself_ends_after_that():
    server = ManifestServer().start()
    thread = server._thread

    async def stop():
        server.stop()

    thread.run(stop(), seconds=5)
    thread._thread.join(30)
    assert not thread._thread.is_alive()
    assert thread.servers == 0


def test_a_server_that_does_not_come_up_in_time_does_not_listen_later(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(_rank_server, "START_SECONDS", 0.1)
    keeps_the_thread = join()
    keeps_the_thread._loop.call_soon_threadsafe(time.sleep, 0.5)
    with pytest.raises(DirectoryUnavailable, match="cannot bind"):
        ManifestServer(port=port).start()
    keeps_the_thread.run(asyncio.sleep(0.2), seconds=10)
    with socket.socket() as dialled:
        assert dialled.connect_ex(("127.0.0.1", port)) != 0
    assert keeps_the_thread.servers == 1
    leave(keeps_the_thread, nothing(), seconds=10)


def test_servers_that_come_and_go_a_hundred_times_leave_nothing():
    for _ in range(100):
        ManifestServer().start().stop(grace=0.0)
    assert not threads()
