"""A source in a process of its own, told what to do line by line, and what tests need around it.

Run as a script it is the source: it registers one range of host memory filled with a pattern, prints one JSON line, and then
answers each command with one JSON line. It serves quickly while `lease` commands outnumber `release` ones.
"""

from __future__ import annotations

import base64
import itertools
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mx_common.transport import Reads, Regions

MIB = 1 << 20
WAIT_S = 60.0

_numbers = itertools.count()


def unique(prefix: str) -> str:
    """An agent name that no other agent of this test run has."""
    return f"{prefix}-{os.getpid()}-{next(_numbers)}"


def regions_of(*arrays: npt.NDArray[np.uint8], mem: str = "DRAM") -> Regions:
    return Regions([a.ctypes.data for a in arrays], [a.nbytes for a in arrays], [0] * len(arrays), mem)


def whole(addr: int, into: npt.NDArray[np.uint8], pieces: int = 1) -> Reads:
    """Reads of `into.nbytes` bytes at `addr`, in equal pieces laid in reverse so that they do not coalesce unless asked to."""
    step = into.nbytes // pieces
    offset = np.arange(pieces, dtype=np.uint64) * np.uint64(step)
    zero = np.zeros(pieces, dtype=np.uint64)
    return Reads(np.uint64(addr) + offset, np.uint64(into.ctypes.data) + offset, np.full(pieces, step), zero, zero)


def pattern(size: int, seed: int) -> npt.NDArray[np.uint8]:
    """Bytes that tell their own position and their seed."""
    words = np.arange(size // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    return words.view(np.uint8)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = WAIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.01)


def once(act: Callable[[], object]) -> Callable[[int, int], None]:
    """A progress callback that acts at the first bytes."""
    acted: list[object] = []

    def progress(done: int, total: int) -> None:
        if not acted:
            acted.append(act())

    return progress


@dataclass
class Source:
    """The parent's view of a source process."""

    process: subprocess.Popen[str]
    addr: int
    size: int
    metadata: bytes
    listen_port: int

    @classmethod
    def start(
        cls, name: str, *, size: int = 64 * MIB, tls: str = "", seed: int = 1, listen: int = 0, prefix: Sequence[str] = ()
    ) -> Source:
        env = {k: v for k, v in os.environ.items() if k != "UCX_TLS"} | ({"UCX_TLS": tls} if tls else {})
        command = [*prefix, sys.executable, str(Path(__file__)), name, str(size), str(seed), str(listen)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        return cls(process, said["addr"], size, base64.b64decode(said["metadata"]), listen)

    def ask(self, command: str) -> Any:
        """Send a command and wait for its answer."""
        assert self.process.stdout is not None
        self.tell(command)
        return json.loads(self.process.stdout.readline())

    def tell(self, command: str) -> None:
        """Send a command that may end the process; no answer is awaited."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """To a live process only; SIGKILL and SIGSTOP have taken effect on return."""
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait(WAIT_S)
        if number == signal.SIGSTOP:
            wait_until(lambda: "T" in _state(self.process.pid), "the stop")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def main(name: str, size: int, seed: int, listen: int) -> None:
    from mx_common.transport.nixl import NixlTransport

    memory = mmap.mmap(-1, size)
    view = np.frombuffer(memory, dtype=np.uint8)
    view[:] = pattern(size, seed)
    transport = NixlTransport(name, listen_port=listen or None)
    transport.register(regions_of(view))
    leases: list[str] = []
    freed = threading.Event()
    serving = True

    def start_serving() -> None:
        transport.serve(lambda: bool(leases))

    start_serving()
    print(json.dumps({"addr": view.ctypes.data, "metadata": base64.b64encode(transport.metadata()).decode()}), flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        answer: object = word
        if word == "lease":
            leases.append(line)
        elif word == "release":
            leases.pop()
        elif word == "hold":  # readers over tcp stand still, with the process alive
            transport.stop_serving()
            serving = False
        elif word == "resume" and not serving:
            start_serving()
            serving = True
        elif word == "fill":
            view[:] = int(rest[0])
        elif word == "deregister":
            transport.deregister()
        elif word == "free":
            # unmapped behind numpy's back, as an allocator that returns memory to the system does
            _munmap(view.ctypes.data, size)
        elif word == "free-unleased":
            _free_when_unleased(leases, freed, view.ctypes.data, size)
        elif word == "freed":
            answer = freed.is_set()
        elif word == "cpu":
            answer = time.process_time()
        print(json.dumps(answer), flush=True)


def _munmap(addr: int, size: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.munmap(ctypes.c_void_p(addr), ctypes.c_size_t(size)) == 0


def _free_when_unleased(leases: list[str], freed: threading.Event, addr: int, size: int) -> None:
    def later() -> None:
        while leases:
            time.sleep(0.01)
        _munmap(addr, size)
        freed.set()

    threading.Thread(target=later, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
    # what is unmapped must not be finalised
    os._exit(0)
