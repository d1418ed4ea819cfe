"""What the NIXL transport does beyond the contract: serving, listeners, device memory, labels, and good manners in the process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from transport_peers import MIB, Source, pattern, regions_of, wait_until, whole

from mx_common.errors import TransferError, TransferTimeout
from mx_common.transport import Reads, Regions
from mx_common.transport._agent import Agent
from mx_common.transport._evidence import Counters, carrier
from mx_common.transport.nixl import NixlTransport

StartSource = Callable[..., Source]
OpenNixl = Callable[..., NixlTransport]


@pytest.mark.parametrize(("tls", "label"), [("", "ucx:cma"), ("tcp", "ucx:tcp")])
def test_the_label_names_what_carried_the_bytes(start_source: StartSource, open_nixl: OpenNixl, tls: str, label: str) -> None:
    source = start_source(tls=tls)
    reader = open_nixl(tls=tls)
    buffer = np.zeros(source.size, dtype=np.uint8)
    reader.register(regions_of(buffer))
    peer = reader.connect(source.metadata)
    source.ask("lease")
    assert reader.read(peer, whole(source.addr, buffer), timeout=60, stall_timeout=30).transport == label


@pytest.mark.parametrize(
    ("sockets", "rdma", "at_once", "expected"),
    [
        ({"socket:[1]": 950, "socket:[2]": 30}, {}, 0, "ucx:tcp"),
        ({"socket:[1]": 10}, {"mlx5_0": 600, "mlx5_1": 400}, 0, "ucx:rdma:mlx5_0+mlx5_1"),
        ({}, {"mlx5_0": 990, "mlx5_1": 3}, 0, "ucx:rdma:mlx5_0"),
        ({}, {"mlx5_0": 0}, 0, "ucx"),
        ({}, {}, 900, "ucx:cma"),
        ({}, {}, 100, "ucx:shm"),
    ],
)
def test_a_label_follows_the_counters_and_claims_no_more(
    sockets: dict[str, int], rdma: dict[str, int], at_once: int, expected: str
) -> None:
    before = Counters({"socket:[1]": 5}, dict.fromkeys(rdma, 7))
    after = Counters(
        {name: n + before.sockets.get(name, 0) for name, n in sockets.items()}, {d: n + 7 for d, n in rdma.items()}
    )
    assert carrier(before, after, 1000, at_once=at_once, host_modules=False) == expected


def test_where_other_modules_could_have_copied_cma_is_not_claimed() -> None:
    assert carrier(Counters(), Counters(), 1000, at_once=1000, host_modules=True) == "ucx:shm"


def test_rdma_counters_are_read_in_words_of_four_bytes_over_all_ports(tmp_path: Path) -> None:
    for port, words in (("1", "250"), ("2", "50")):
        counters = tmp_path / "class/infiniband/mlx5_0/ports" / port / "counters"
        counters.mkdir(parents=True)
        (counters / "port_rcv_data").write_text(words + "\n")
    assert Counters.now(tmp_path).rdma == {"mlx5_0": 1200}


def test_a_serving_source_without_readers_keeps_no_core_busy(start_source: StartSource) -> None:
    source = start_source(tls="tcp")

    def share() -> float:
        start, used = time.monotonic(), source.ask("cpu")
        time.sleep(1)
        return float((source.ask("cpu") - used) / (time.monotonic() - start))

    # a progress thread takes all of a core in every second; virtual machines charge up to 0.02 s for waking up at all
    wait_until(lambda: share() < 0.1, "a second without work", seconds=20)


def test_a_reader_that_holds_no_lease_still_advances(start_source: StartSource, open_nixl: OpenNixl) -> None:
    source = start_source(tls="tcp")
    reader = open_nixl(tls="tcp")
    buffer = np.zeros(source.size, dtype=np.uint8)
    reader.register(regions_of(buffer))
    reader.read(reader.connect(source.metadata), whole(source.addr, buffer), timeout=60, stall_timeout=30)
    assert (buffer == pattern(source.size, 1)).all()


def test_serving_goes_on_when_the_question_whether_somebody_reads_fails(open_nixl: OpenNixl) -> None:
    def broken() -> bool:
        raise RuntimeError("lease table broken")

    source, reader = open_nixl(tls="tcp"), open_nixl(tls="tcp")
    there, here = pattern(8 * MIB, 3).copy(), np.zeros(8 * MIB, dtype=np.uint8)
    source.register(regions_of(there))
    reader.register(regions_of(here))
    source.serve(broken)
    reader.read(reader.connect(source.metadata()), whole(there.ctypes.data, here), timeout=60, stall_timeout=30)
    assert (here == there).all()


def test_a_listener_hands_out_its_metadata_to_an_agent_opened_without_one(
    start_source: StartSource, open_nixl: OpenNixl, free_port: int
) -> None:
    source = start_source("listening-source", listen=free_port)
    reader = open_nixl()
    buffer = np.zeros(source.size, dtype=np.uint8)
    reader.register(regions_of(buffer))
    peer = reader.connect_listener("listening-source", "127.0.0.1", free_port, 30)
    source.ask("lease")
    reader.read(peer, whole(source.addr, buffer), timeout=60, stall_timeout=30)
    assert (buffer == pattern(source.size, 1)).all()


def test_a_listener_that_is_not_there_is_waited_for_no_longer_than_asked(open_nixl: OpenNixl, free_port: int) -> None:
    with pytest.raises(TransferTimeout, match=f"'ghost' from 127.0.0.1:{free_port} within 0.3 s"):
        open_nixl().connect_listener("ghost", "127.0.0.1", free_port, 0.3)


def test_an_agent_in_use_is_not_opened_again_behind_its_peers_back(open_nixl: OpenNixl, free_port: int) -> None:
    reader = open_nixl()
    reader.metadata()
    with pytest.raises(TransferError, match="listen_port=0"):
        reader.connect_listener("ghost", "127.0.0.1", free_port, 0.3)


class RecordingNixl:
    """Stands in for NIXL's own agent object, since no device memory is at hand: notes what it is given, completes at once."""

    def __init__(self, refuses: int = 0) -> None:
        self.agent = type("Binding", (), {})()
        self.registered: list[tuple[npt.NDArray[np.uint64], str]] = []
        self.described: list[tuple[list[list[int]], str]] = []
        self.refuses = refuses

    def register_memory(self, rows: npt.NDArray[np.uint64], mem: str) -> object:
        if self.refuses:
            self.refuses -= 1
            raise RuntimeError("one registration over two allocations")
        self.registered.append((rows, mem))
        return object()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return metadata

    def remove_remote_agent(self, peer: str) -> None: ...

    def get_xfer_descs(self, rows: npt.NDArray[np.uint64], mem: str) -> object:
        assert rows.dtype == np.uint64
        self.described.append((rows.tolist(), mem))
        return object()

    def initialize_xfer(self, operation: str, local: object, remote: object, peer: str) -> Any:
        assert operation == "READ"
        return type("Handle", (), {"release": lambda self: None})()

    def transfer(self, handle: object) -> str:
        return "DONE"


def recorded(nixl: RecordingNixl, open_nixl: OpenNixl) -> NixlTransport:
    def opener(name: str, backend: str, listen_port: int | None) -> Agent:
        agent = Agent(name, backend, listen_port)
        agent._nixl = nixl
        return agent

    return open_nixl(opener=opener)


def test_device_memory_reaches_nixl_as_vram_with_its_device_numbers(open_nixl: OpenNixl) -> None:
    nixl = RecordingNixl()
    transport = recorded(nixl, open_nixl)
    transport.register(Regions([4096, 8192, 4096], [4096, 4096, 64], [3, 3, 5], "VRAM"))  # type: ignore[arg-type]
    (rows, mem), *others = nixl.registered
    assert (rows.tolist(), mem, others) == ([[4096, 8192, 3], [4096, 64, 5]], "VRAM", [])
    reads = Reads([100, 200], [4096, 4096], [64, 32], [1, 2], [3, 5], "VRAM", "VRAM")  # type: ignore[arg-type]
    result = transport.read(transport.connect(b"peer"), reads, timeout=5, stall_timeout=5)
    # once to check the whole, once to post it: local, then remote
    assert nixl.described[2:] == [
        ([[4096, 64, 3], [4096, 32, 5]], "VRAM"),
        ([[100, 64, 1], [200, 32, 2]], "VRAM"),
    ]
    assert result.wire_bytes == 96


def test_regions_that_may_not_be_registered_as_one_are_registered_one_by_one(open_nixl: OpenNixl) -> None:
    nixl = RecordingNixl(refuses=1)
    recorded(nixl, open_nixl).register(Regions([4096, 8192], [4096, 4096], [0, 0], "VRAM"))  # type: ignore[arg-type]
    assert [rows.tolist() for rows, _ in nixl.registered] == [[[4096, 4096, 0], [8192, 4096, 0]]]


MANNERS = """
import logging, os, threading
from mx_common.transport import open_transport
assert not any(name.startswith("UCX_") for name in os.environ if name != "UCX_TCP_KEEPIDLE")
transport = open_transport("polite")
assert logging.raiseExceptions
assert os.environ["UCX_TCP_KEEPIDLE"] == "7s"
assert os.environ["UCX_TCP_KEEPINTVL"] == "1s"
transport.close()
"""


def test_opening_prints_nothing_on_stdout_and_keeps_what_the_operator_set() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")} | {"UCX_TCP_KEEPIDLE": "7s"}
    done = subprocess.run([sys.executable, "-c", MANNERS], capture_output=True, text=True, timeout=60, check=False, env=env)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
