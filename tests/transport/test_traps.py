"""What one-sided reads do silently, shown on real NIXL with real processes, and what of this package guards against it."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from transport_peers import MIB, Source, once, pattern, regions_of, wait_until, whole

from mx_common.errors import SourceLost, TransferError
from mx_common.transport.nixl import NixlTransport

StartSource = Callable[..., Source]
OpenNixl = Callable[..., NixlTransport]
Bytes = npt.NDArray[np.uint8]

UNTOUCHED = 0xEE
QUIET_S = 1.0


class Abandoned(Exception):
    """Raised by a test's progress callback: the caller gives up mid-read."""


def aborted_read(start_source: StartSource, open_nixl: OpenNixl) -> tuple[Source, NixlTransport, Bytes]:
    """A tcp read that was given up after its first bytes; the source is alive and keeps answering what was asked of it."""
    source = start_source(tls="tcp")
    reader, buffer, peer = connected(source, open_nixl, "tcp", UNTOUCHED)

    def give_up(done: int, total: int) -> None:
        raise Abandoned

    with pytest.raises(Abandoned):
        reader.read(peer, whole(source.addr, buffer), timeout=60, stall_timeout=30, progress=give_up)
    return source, reader, buffer


def connected(source: Source, open_nixl: OpenNixl, tls: str, fill: int = 0) -> tuple[NixlTransport, Bytes, str]:
    """A reader with registered memory of the source's size, connected and holding a lease."""
    reader = open_nixl(tls=tls)
    buffer = np.full(source.size, fill, dtype=np.uint8)
    reader.register(regions_of(buffer))
    source.ask("lease")
    return reader, buffer, reader.connect(source.metadata)


def landed(buffer: Bytes) -> int:
    return int(np.count_nonzero(buffer != UNTOUCHED))


def test_late_bytes_of_an_aborted_read_land_until_the_transport_is_closed(
    start_source: StartSource, open_nixl: OpenNixl
) -> None:
    _, reader, buffer = aborted_read(start_source, open_nixl)
    assert reader.tainted
    reader.deregister()
    at_abort = landed(buffer)
    assert 0 < at_abort < buffer.nbytes
    # the agent goes on living, as it does when another source is tried next
    reader.serve(lambda: True)
    wait_until(lambda: landed(buffer) > at_abort, "a late write (the trap this guards against)")


def test_after_close_no_byte_of_an_aborted_read_lands(start_source: StartSource, open_nixl: OpenNixl) -> None:
    source, reader, buffer = aborted_read(start_source, open_nixl)
    assert landed(buffer) < buffer.nbytes
    reader.close()
    buffer[:] = UNTOUCHED
    # the source is alive, and another agent of this process moves bytes meanwhile
    other = open_nixl(tls="tcp")
    elsewhere = np.zeros(source.size, dtype=np.uint8)
    other.register(regions_of(elsewhere))
    other.read(other.connect(source.metadata), whole(source.addr, elsewhere), timeout=60, stall_timeout=30)
    time.sleep(QUIET_S)
    assert landed(buffer) == 0
    assert (elsewhere == pattern(source.size, 1)).all()


def test_close_destroys_the_agent_even_while_the_error_of_the_read_is_being_handled(
    start_source: StartSource, open_nixl: OpenNixl
) -> None:
    source = start_source(tls="tcp")
    reader, buffer, peer = connected(source, open_nixl, "tcp")
    with pytest.raises(SourceLost) as caught:
        reader.read(
            peer, whole(source.addr, buffer), timeout=60, stall_timeout=30, progress=once(lambda: source.signal(signal.SIGKILL))
        )
    # the traceback of this error leads through every frame of the read, and is alive while the agent is destroyed
    assert caught.tb is not None
    reader.close()
    with pytest.raises(TransferError, match="closed"):
        reader.metadata()


def test_an_agent_that_something_still_holds_is_reported_and_not_called_closed(open_nixl: OpenNixl) -> None:
    reader = open_nixl()
    held = reader._agent._nixl.agent
    with pytest.raises(TransferError, match="must stay unused"):
        reader.close()
    del held


@pytest.mark.parametrize("tls", ["", "tcp"])
def test_deregistering_does_not_revoke_a_readers_access_so_only_leases_protect_memory(
    start_source: StartSource, open_nixl: OpenNixl, tls: str
) -> None:
    source = start_source(tls=tls, size=MIB)
    reader, buffer, peer = connected(source, open_nixl, tls)
    reader.read(peer, whole(source.addr, buffer), timeout=60, stall_timeout=30)
    source.ask("deregister")
    source.ask("fill 5")
    reader.read(peer, whole(source.addr, buffer), timeout=60, stall_timeout=30)
    assert (buffer == 5).all()


def test_a_source_that_frees_memory_under_a_tcp_reader_dies(start_source: StartSource, open_nixl: OpenNixl) -> None:
    source = start_source(tls="tcp")
    reader, buffer, peer = connected(source, open_nixl, "tcp")
    with pytest.raises(SourceLost):
        reader.read(peer, whole(source.addr, buffer), timeout=60, stall_timeout=30, progress=once(lambda: source.tell("free")))
    assert source.process.wait(60) == -signal.SIGSEGV


def test_a_source_that_waits_for_leases_before_it_frees_memory_lives(start_source: StartSource, open_nixl: OpenNixl) -> None:
    source = start_source(tls="tcp")
    reader, buffer, peer = connected(source, open_nixl, "tcp")
    reader.read(
        peer, whole(source.addr, buffer), timeout=60, stall_timeout=30, progress=once(lambda: source.ask("free-unleased"))
    )
    assert (buffer == pattern(source.size, 1)).all()
    assert source.ask("freed") is False
    reader.disconnect(peer)
    source.ask("release")
    wait_until(lambda: source.ask("freed") is True, "the release of the memory")
    assert source.process.poll() is None


@pytest.mark.parametrize("tls", ["", "tcp"])
def test_a_source_that_overwrites_its_memory_mid_read_gives_mixed_bytes_and_no_error(
    start_source: StartSource, open_nixl: OpenNixl, tls: str
) -> None:
    source = start_source(tls=tls)
    source.ask("fill 1")
    reader, buffer, peer = connected(source, open_nixl, tls)
    result = reader.read(
        peer, whole(source.addr, buffer), timeout=60, stall_timeout=30, progress=once(lambda: source.ask("fill 2"))
    )
    assert result.wire_bytes == buffer.nbytes
    assert not reader.tainted
    # nothing but a digest of the whole can tell: neither version arrived
    assert set(np.unique(buffer).tolist()) == {1, 2}


@pytest.mark.parametrize("tls", ["", "tcp"])
def test_the_measured_seconds_do_not_depend_on_the_peer_being_still_connected(
    start_source: StartSource, open_nixl: OpenNixl, tls: str
) -> None:
    source = start_source(tls=tls)
    reader, buffer, peer = connected(source, open_nixl, tls)
    start = time.perf_counter()
    result = reader.read(peer, whole(source.addr, buffer), timeout=60, stall_timeout=30)
    around = time.perf_counter() - start
    reader.disconnect(peer)
    source.end()
    # NIXL's own telemetry is garbage from here on; ours is a value
    assert 0 < result.wire_seconds <= around
    assert result.wire_seconds > around / 2
    assert result.wire_bytes == buffer.nbytes


# a reader that knows nothing of this package, with UCX as it comes
PLAIN_READER = """
import base64, sys
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

addr, size, metadata = int(sys.argv[1]), int(sys.argv[2]), base64.b64decode(sys.argv[3])
agent = nixl_agent("plain", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
buffer = np.zeros(size, dtype=np.uint8)
agent.register_memory(np.array([[buffer.ctypes.data, size, 0]], dtype=np.uint64), "DRAM")
peer = agent.add_remote_agent(metadata)
rows = [np.array([[start, size, 0]], dtype=np.uint64) for start in (buffer.ctypes.data, addr)]
handle = agent.initialize_xfer("READ", *(agent.get_xfer_descs(one, "DRAM") for one in rows), peer)
state = agent.transfer(handle)
while state == "PROC":
    state = agent.check_xfer_state(handle)
assert state == "DONE", state
np.save(sys.argv[4], buffer)
"""


def test_a_tcp_reader_with_small_receive_buffers_survives_this_source(start_source: StartSource, tmp_path: Path) -> None:
    # UCX writes past the end of a receive buffer that is smaller than what the other side sends at once
    source = start_source(tls="tcp")
    source.ask("lease")
    env = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")} | {"UCX_TLS": "tcp"}
    given = [str(source.addr), str(source.size), base64.b64encode(source.metadata).decode(), str(tmp_path / "read.npy")]
    done = subprocess.run([sys.executable, "-c", PLAIN_READER, *given], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    assert (np.load(tmp_path / "read.npy") == pattern(source.size, 1)).all()
    assert source.ask("cpu") > 0


def test_this_reader_survives_a_tcp_source_that_sends_large_pieces(start_source: StartSource, open_nixl: OpenNixl) -> None:
    source = start_source(tls="tcp", prefix=["env", "UCX_TCP_TX_SEG_SIZE=256k"])
    reader, buffer, peer = connected(source, open_nixl, "tcp")
    reader.read(peer, whole(source.addr, buffer), timeout=60, stall_timeout=30)
    assert (buffer == pattern(source.size, 1)).all()
