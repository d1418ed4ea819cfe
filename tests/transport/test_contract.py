"""One contract, two transports: what any implementation of the protocol promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
from transport_peers import MIB, pattern, regions_of, unique, whole

from mx_common.errors import ConfigError, MxError, TransferError
from mx_common.transport import LocalTransport, Reads, Regions, Transport, open_transport

Bytes = npt.NDArray[np.uint8]


@pytest.fixture(params=["local", "nixl"])
def pair(request: pytest.FixtureRequest) -> Iterator[Callable[[], tuple[Transport, Transport]]]:
    """Two agents of one kind in this process: source, target."""
    opened: list[Transport] = []

    def open_two() -> tuple[Transport, Transport]:
        opened.extend(open_transport(unique(side), request.param) for side in ("source", "target"))
        opened[-2].serve(lambda: True)
        return opened[-2], opened[-1]

    yield open_two
    for transport in opened:
        transport.close()


@pytest.fixture
def linked(pair: Callable[[], tuple[Transport, Transport]]) -> tuple[Transport, Transport, str, Bytes, Bytes]:
    """Source, target, the source's name at the target, and registered memory of both."""
    source, target = pair()
    there, here = pattern(4 * MIB, 7).copy(), np.zeros(4 * MIB, dtype=np.uint8)
    source.register(regions_of(there))
    target.register(regions_of(here))
    return source, target, target.connect(source.metadata()), there, here


Linked = tuple[Transport, Transport, str, Bytes, Bytes]


def test_a_read_brings_every_byte_and_reports_what_moved(linked: Linked) -> None:
    source, target, peer, there, here = linked
    seen: list[tuple[int, int]] = []
    result = target.read(
        peer,
        whole(there.ctypes.data, here, 64),
        timeout=60,
        stall_timeout=30,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert peer == source.name
    assert (here == there).all()
    assert result.wire_bytes == here.nbytes
    assert result.wire_seconds > 0
    assert result.transport.split(":")[0] in ("ucx", "local")
    assert seen == sorted(seen)
    assert seen[-1] == (here.nbytes, here.nbytes)
    assert not target.tainted


def test_adjacent_reads_reach_the_wire_as_few(linked: Linked) -> None:
    _, target, peer, there, here = linked
    result = target.read(peer, whole(there.ctypes.data, here, 1024), timeout=60, stall_timeout=30)
    assert result.descriptors < 64


def test_only_the_bytes_that_were_asked_for_change(linked: Linked) -> None:
    _, target, peer, there, here = linked
    reads = Reads([there.ctypes.data + 1000], [here.ctypes.data + 77], [4096], [0], [0])
    target.read(peer, reads, timeout=60, stall_timeout=30)
    expected = np.zeros_like(here)
    expected[77 : 77 + 4096] = there[1000 : 1000 + 4096]
    assert (here == expected).all()


def test_no_reads_move_nothing(linked: Linked) -> None:
    _, target, peer, _, _ = linked
    result = target.read(peer, Reads([], [], [], [], []), timeout=60, stall_timeout=30)
    assert (result.wire_bytes, result.descriptors) == (0, 0)


@pytest.mark.parametrize("side", ["remote", "local"])
def test_a_range_outside_registered_memory_is_refused_before_a_byte_moves(linked: Linked, side: str) -> None:
    _, target, peer, there, here = linked
    past = there.nbytes - 8
    remote = [there.ctypes.data, there.ctypes.data + (past if side == "remote" else 64)]
    local = [here.ctypes.data, here.ctypes.data + (past if side == "local" else 128)]
    with pytest.raises(TransferError, match="regist"):
        target.read(peer, Reads(remote, local, [32, 32], [0, 0], [0, 0]), timeout=60, stall_timeout=30)
    assert not here.any()
    assert not target.tainted


@pytest.mark.parametrize("garbage", [b"", b"garbage", b"\x00" * 100, b'{"agent": 1}'])
def test_metadata_that_is_not_metadata_is_refused(linked: Linked, garbage: bytes) -> None:
    _, target, _, _, _ = linked
    with pytest.raises(TransferError, match="metadata"):
        target.connect(garbage)


def test_metadata_cut_short_is_refused(linked: Linked) -> None:
    source, target, _, _, _ = linked
    whole_metadata = source.metadata()
    with pytest.raises(TransferError, match="metadata"):
        target.connect(whole_metadata[: len(whole_metadata) // 2])


def test_an_agent_does_not_connect_to_itself(linked: Linked) -> None:
    _, target, _, _, _ = linked
    with pytest.raises(MxError):
        target.connect(target.metadata())


def test_a_peer_can_be_read_again_after_disconnect_and_connect(linked: Linked) -> None:
    source, target, peer, there, here = linked
    reads = whole(there.ctypes.data, here)
    target.read(peer, reads, timeout=60, stall_timeout=30)
    target.disconnect(peer)
    target.disconnect(peer)
    with pytest.raises(TransferError, match="not connected"):
        target.read(peer, reads, timeout=60, stall_timeout=30)
    there[:] = 9
    target.read(target.connect(source.metadata()), reads, timeout=60, stall_timeout=30)
    assert (here == 9).all()


def test_what_progress_raises_ends_the_read(linked: Linked) -> None:
    _, target, peer, there, here = linked

    def refuse(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        target.read(peer, whole(there.ctypes.data, here), timeout=60, stall_timeout=30, progress=refuse)


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (float("nan"), 1.0)])
def test_a_read_without_a_bound_is_refused(linked: Linked, bounds: tuple[float, float]) -> None:
    _, target, peer, there, here = linked
    with pytest.raises(ConfigError, match="positive number of seconds"):
        target.read(peer, whole(there.ctypes.data, here), timeout=bounds[0], stall_timeout=bounds[1])


def test_a_closed_transport_refuses_use(linked: Linked) -> None:
    source, target, peer, there, here = linked
    metadata = source.metadata()
    target.close()
    target.close()
    uses: list[Callable[[], object]] = [
        lambda: target.register(regions_of(here)),
        lambda: target.metadata(),
        lambda: target.connect(metadata),
        lambda: target.read(peer, whole(there.ctypes.data, here), timeout=1, stall_timeout=1),
        lambda: target.serve(lambda: False),
    ]
    for use in uses:
        with pytest.raises(TransferError):
            use()


def test_regions_of_nothing_register_nothing(pair: Callable[[], tuple[Transport, Transport]]) -> None:
    _, target = pair()
    target.register(Regions([], [], []))


def test_an_unknown_kind_of_transport_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="local, nixl"):
        open_transport("x", "carrier-pigeon")


def test_two_in_process_agents_may_not_share_a_name() -> None:
    name = unique("same")
    first = LocalTransport(name)
    with pytest.raises(ConfigError, match="its own name"):
        LocalTransport(name)
    first.close()
    LocalTransport(name).close()


def test_an_injected_fault_aborts_the_in_process_read_and_taints_it() -> None:
    def cut(done: int) -> None:
        if done:
            raise TransferError("cut")

    source, target = LocalTransport(unique("source")), LocalTransport(unique("target"), fault=cut)
    there, here = pattern(8192, 1), np.zeros(8192, dtype=np.uint8)
    source.register(regions_of(there))
    target.register(regions_of(here))
    a, b = there.ctypes.data, here.ctypes.data
    with pytest.raises(TransferError, match="cut"):
        target.read(
            target.connect(source.metadata()), Reads([a, a], [b, b + 4096], [8, 8], [0, 0], [0, 0]), timeout=1, stall_timeout=1
        )
    assert target.tainted
    source.close()
    target.close()
