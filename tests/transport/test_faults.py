"""What goes wrong on a wire, with real processes: each ends in an error of the tree, in bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from transport_peers import MIB, Source, once, pattern, regions_of, unique, whole

from mx_common.errors import SourceLost, TransferError, TransferTimeout, TransportUnavailable
from mx_common.transport import Reads, Regions
from mx_common.transport.nixl import NixlTransport

StartSource = Callable[..., Source]
OpenNixl = Callable[..., NixlTransport]


@pytest.mark.parametrize("tls", ["", "tcp"])
def test_a_killed_source_is_lost_at_once_while_others_go_on_and_its_name_can_come_back(
    start_source: StartSource, open_nixl: OpenNixl, tls: str
) -> None:
    name = unique("source")
    doomed, other = start_source(name, tls=tls), start_source(tls=tls, seed=2)
    reader = open_nixl(tls=tls)
    buffer = np.zeros(doomed.size, dtype=np.uint8)
    reader.register(regions_of(buffer))
    peer, second = reader.connect(doomed.metadata), reader.connect(other.metadata)
    doomed.ask("lease")
    other.ask("lease")
    # the stall bound is far away: it is the loss itself that ends the read
    with pytest.raises(SourceLost, match=name):
        reader.read(
            peer,
            whole(doomed.addr, buffer),
            timeout=250,
            stall_timeout=250,
            progress=once(lambda: doomed.signal(signal.SIGKILL)),
        )
    reader.read(second, whole(other.addr, buffer), timeout=60, stall_timeout=30)
    assert (buffer == pattern(other.size, 2)).all()
    reader.disconnect(peer)
    reborn = start_source(name, tls=tls, seed=3)
    reborn.ask("lease")
    reader.read(reader.connect(reborn.metadata), whole(reborn.addr, buffer), timeout=60, stall_timeout=30)
    assert (buffer == pattern(reborn.size, 3)).all()


def test_a_stopped_source_times_out_by_the_stall_bound_with_what_and_where_in_the_message(
    start_source: StartSource, open_nixl: OpenNixl
) -> None:
    source = start_source(tls="tcp")
    reader = open_nixl(tls="tcp")
    buffer = np.zeros(source.size, dtype=np.uint8)
    reader.register(regions_of(buffer))
    source.ask("lease")
    peer = reader.connect(source.metadata)
    with pytest.raises(TransferTimeout) as caught:
        reader.read(
            peer,
            whole(source.addr, buffer),
            timeout=250,
            stall_timeout=0.5,
            progress=once(lambda: source.signal(signal.SIGSTOP)),
        )
    said = str(caught.value)
    assert peer in said
    assert f"of {source.size} bytes" in said
    assert "MX_TRANSFER_STALL_TIMEOUT" in said
    assert reader.tainted


def test_a_source_that_trickles_times_out_by_the_bound_on_the_whole(start_source: StartSource, open_nixl: OpenNixl) -> None:
    source = start_source(tls="tcp")
    reader = open_nixl(tls="tcp")
    buffer = np.zeros(source.size, dtype=np.uint8)
    reader.register(regions_of(buffer))
    source.ask("lease")
    peer = reader.connect(source.metadata)
    with pytest.raises(TransferTimeout, match="MX_TRANSFER_TIMEOUT"):
        reader.read(peer, whole(source.addr, buffer), timeout=0.5, stall_timeout=250, progress=once(lambda: source.ask("hold")))


def test_a_wrong_address_is_refused_by_nixl_and_named(start_source: StartSource, open_nixl: OpenNixl) -> None:
    source = start_source(size=MIB)
    reader = open_nixl()
    buffer = np.zeros(MIB, dtype=np.uint8)
    reader.register(regions_of(buffer))
    peer = reader.connect(source.metadata)
    with pytest.raises(TransferError, match=f"{peer}.*outside the memory registered"):
        reader.read(peer, whole(source.addr + 64, buffer), timeout=60, stall_timeout=30)


def test_metadata_of_another_life_of_a_connected_name_is_refused_until_it_is_disconnected(
    start_source: StartSource, open_nixl: OpenNixl
) -> None:
    name = unique("source")
    first, second = start_source(name, size=MIB), start_source(name, size=MIB)
    reader = open_nixl()
    reader.connect(first.metadata)
    with pytest.raises(TransferError, match="disconnect it first"):
        reader.connect(second.metadata)
    reader.disconnect(name)
    assert reader.connect(second.metadata) == name


def test_reads_joined_across_two_registrations_of_a_peer_still_arrive(open_nixl: OpenNixl) -> None:
    source, reader = open_nixl(), open_nixl()
    there, here = pattern(2 * MIB, 5).copy(), np.zeros(2 * MIB, dtype=np.uint8)
    # as a peer does that registers tensor by tensor, and whose tensors happen to touch
    source.register(regions_of(there[:MIB]))
    source.register(regions_of(there[MIB:]))
    reader.register(regions_of(here))
    source.serve(lambda: True)
    result = reader.read(reader.connect(source.metadata()), whole(there.ctypes.data, here, 2), timeout=60, stall_timeout=30)
    assert (here == there).all()
    assert result.wire_bytes == 2 * MIB


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str, str]]:
    """Two network namespaces joined by a link: name of the source's, name of the reader's, and the reader's device."""
    tag = f"{os.getpid() % 100000}"
    source, reader = f"mxs{tag}", f"mxr{tag}"
    device, far = f"mxa{tag}", f"mxb{tag}"
    steps = [
        f"ip netns add {source}",
        f"ip netns add {reader}",
        f"ip link add {device} netns {reader} type veth peer name {far} netns {source}",
        f"ip -n {reader} addr add 10.213.0.1/30 dev {device}",
        f"ip -n {source} addr add 10.213.0.2/30 dev {far}",
        f"ip -n {reader} link set {device} up",
        f"ip -n {source} link set {far} up",
        f"ip -n {reader} link set lo up",
        f"ip -n {source} link set lo up",
    ]
    try:
        for step in steps:
            subprocess.run(step.split(), check=True)
        yield source, reader, device
    finally:
        for namespace in (source, reader):
            subprocess.run(["ip", "netns", "del", namespace], check=False)


def test_a_link_that_goes_down_mid_read_ends_the_read_and_spares_the_source(
    start_source: StartSource, two_hosts: tuple[str, str, str], tmp_path: Path
) -> None:
    there, here, device = two_hosts
    source = start_source(tls="tcp", prefix=("ip", "netns", "exec", there))
    source.ask("lease")
    metadata = tmp_path / "metadata"
    metadata.write_bytes(source.metadata)
    reader = subprocess.run(
        ["ip", "netns", "exec", here, sys.executable, __file__, str(metadata), str(source.addr), str(source.size), device],
        env={**os.environ, "UCX_TLS": "tcp"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # UCX adds lines of its own about what it could not flush
    ended = [line for line in reader.stdout.splitlines() if line in ("TransferTimeout", "SourceLost", "TransferError")]
    assert ended, reader.stdout + reader.stderr
    assert source.process.poll() is None


def read_over_a_dying_link(metadata: str, addr: int, size: int, device: str) -> str:
    """In the reader's namespace: the name of the error of a read whose link is taken down at the first bytes."""
    transport = NixlTransport(unique("reader"))
    buffer = np.zeros(size, dtype=np.uint8)
    transport.register(regions_of(buffer))
    peer = transport.connect(Path(metadata).read_bytes())
    down = once(lambda: subprocess.run(["ip", "link", "set", device, "down"], check=True))
    try:
        transport.read(peer, whole(addr, buffer), timeout=60, stall_timeout=5, progress=down)
    except TransferError as error:  # ours or UCX's, whichever notices first
        return type(error).__name__
    finally:
        transport.close()
    return "the read ended well"


def test_a_backend_that_cannot_work_here_is_refused_with_the_variable_to_set(open_nixl: OpenNixl) -> None:
    for backend in ("NO_SUCH_BACKEND", "GDS"):
        with pytest.raises(TransportUnavailable, match="MX_NIXL_BACKEND"):
            open_nixl(backend=backend)


def test_a_missing_package_is_refused_with_the_command_that_installs_it() -> None:
    # a process of its own: None in sys.modules is how the interpreter itself marks a module that cannot be imported
    script = (
        "import sys; sys.modules['nixl'] = None\n"
        "from mx_common.errors import TransportUnavailable\n"
        "from mx_common.transport import open_transport\n"
        "try: open_transport('x')\n"
        "except TransportUnavailable as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "pip install 'mx-adapters[nixl]'" in said


def test_memory_that_the_backend_cannot_register_is_refused(open_nixl: OpenNixl) -> None:
    here = np.zeros(MIB, dtype=np.uint8)
    with pytest.raises(TransferError, match="registering 1 VRAM regions"):
        open_nixl().register(Regions([here.ctypes.data], [MIB], [0], "VRAM"))  # type: ignore[arg-type]


def test_an_unknown_peer_is_refused(open_nixl: OpenNixl) -> None:
    with pytest.raises(TransferError, match="not connected"):
        open_nixl().read("nobody", Reads([64], [64], [8], [0], [0]), timeout=1, stall_timeout=1)  # type: ignore[arg-type]


if __name__ == "__main__":
    print(read_over_a_dying_link(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
