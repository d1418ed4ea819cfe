"""A pull through `mx_common.load` against one raw NIXL read of the same bytes over the same transport.

    python -m benchmarks.load_pull [--tensors 2000] [--bytes 1073741824] [--repeat 7] [--json]

Raw session: agent, registration, connection and one transfer over all tensors, polled until it is done: the least a program needs that
knows addresses and metadata already. Raw transfer: the last of these alone, on an agent that was warmed up. Load: everything a target
does, from asking the directory to the verdict. All write into the same memory and take turns; ratios are of medians. Also: what digests
add.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks._fleet import job, log, source
from mx_common.directory import DirectoryClient
from mx_common.directory.worker_client import LeaseKeeper, WorkerClient
from mx_common.load import load
from mx_common.load.tensors import TensorTable


class Memory:
    """An engine whose model is memory that exists: `build` costs nothing, so that only the pull is timed."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.tensors = {f"t{n}": torch.zeros(nbytes, dtype=torch.uint8) for n in range(count)}

    def build(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def discard(self) -> None:
        pass

    def load_from_storage(self) -> dict[str, torch.Tensor]:
        raise FileNotFoundError("the benchmark has no storage")


def timed_load(engine: Memory, address: str, *, verify: bool) -> float:
    start = time.perf_counter()
    loaded = load(job(f"target-{time.monotonic_ns()}", address, verify=verify), engine, log)
    seconds = time.perf_counter() - start
    assert loaded.pulled is not None, loaded.reasons
    assert loaded.transport is not None
    loaded.transport.close()
    return seconds


class RawSource:
    """What a raw NIXL program is given: the source's addresses and agent metadata, fetched beforehand."""

    def __init__(self, address: str) -> None:
        with DirectoryClient(address) as client:
            (ref,) = client.list_sources().instances
            found = client.get_metadata(ref.mx_source_id, ref.worker_id)
        assert found is not None
        self.metadata = found.worker.nixl_metadata
        self.control = WorkerClient(found.worker.worker_grpc_endpoint, ref.mx_source_id)
        self.rows = columns(TensorTable.from_descriptors(self.control.get_manifest().tensors))


class RawSession:
    """A plain NIXL agent over the target's memory."""

    def __init__(self, memory: Memory, source: RawSource) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(f"raw-{time.monotonic_ns()}", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        rows = columns(TensorTable.from_torch(memory.tensors))
        self.registered = self.agent.register_memory(rows, "DRAM")
        peer = self.agent.add_remote_agent(source.metadata)
        self.peer = peer.decode() if isinstance(peer, bytes) else peer
        self.local, self.remote = self.agent.get_xfer_descs(rows, "DRAM"), self.agent.get_xfer_descs(source.rows, "DRAM")

    def read(self) -> float:
        """One transfer of everything, polled until it is done; seconds."""
        start = time.perf_counter()
        handle = self.agent.initialize_xfer("READ", self.local, self.remote, self.peer)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        seconds = time.perf_counter() - start
        assert state == "DONE", state
        self.agent.release_xfer_handle(handle)
        return seconds

    def close(self) -> None:
        self.agent.deregister_memory(self.registered)
        self.agent.remove_remote_agent(self.peer)


def raw_session(memory: Memory, source: RawSource) -> float:
    """Seconds from nothing to all bytes read: agent, registration, connection, one transfer.

    A lease is held, outside the time taken: the source is as quick to answer as it is for a load.
    """
    with LeaseKeeper(source.control):
        start = time.perf_counter()
        session = RawSession(memory, source)
        session.read()
        seconds = time.perf_counter() - start
    session.close()
    return seconds


def leased(session: RawSession, source: RawSource) -> float:
    """Seconds of one transfer under a lease, taken outside them."""
    with LeaseKeeper(source.control):
        return session.read()


def columns(table: TensorTable) -> np.ndarray:
    """[n, 3] of address, bytes, device, as NIXL takes them."""
    return np.stack([table.addr, table.size, table.device], axis=1)


def measure(count: int, nbytes: int, repeat: int) -> dict[str, Any]:
    """Medians in seconds and their ratios, for the transport UCX chooses now."""
    memory = Memory(count, nbytes)
    times: dict[str, list[float]] = {name: [] for name in ("raw_transfer", "raw_session", "load", "load_digests")}
    with source(count, nbytes) as (address, _):
        given = RawSource(address)
        warm = RawSession(memory, given)
        leased(warm, given)
        for _ in range(repeat):
            times["raw_transfer"].append(leased(warm, given))
            times["raw_session"].append(raw_session(memory, given))
            times["load"].append(timed_load(memory, address, verify=False))
            times["load_digests"].append(timed_load(memory, address, verify=True))
        warm.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "seconds": {name: round(value, 4) for name, value in medians.items()},
        "load_over_raw_session": round(medians["load"] / medians["raw_session"], 3),
        "load_over_raw_transfer": round(medians["load"] / medians["raw_transfer"], 3),
        "digests_add": round(medians["load_digests"] / medians["load"] - 1, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    os.environ["MX_RESHARD_MIN_GBPS"] = "0"
    result = {}
    for name, tls in (("default", None), ("tcp", "tcp")):
        if tls is not None:
            os.environ["UCX_TLS"] = tls
        result[name] = measure(given.tensors, given.bytes // given.tensors, given.repeat)
    print(json.dumps(result) if given.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
