"""One receiver's connections to its sources: a transport, or several side by side.

    lanes = Lanes("receiver-7", open_transport)
    lanes.attach(memory, table.agents)                 # registers and connects what is new; see `suits`
    lanes.read(table.agents[0], reads, timeout=300, stall_timeout=30, progress=hook)
    lanes.close()

What comes from the same host into host memory is copied by the thread that asks, and one transport copies for one thread at a time: with
a lane for each of several sources several cores copy. Into a device's memory others move the bytes, and one lane is enough.

Invariant: every lane has registered the same memory; `close` ends all of them, also when one cannot be ended, before it raises.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence

from mx_common.refit._memory import Memory
from mx_common.refit.table import Agent
from mx_common.transport import Progress, Reads, Transport, WireResult

__all__ = ["Lanes"]

_MOST = 4

# Memory of aborted reads whose transport could not be destroyed: late bytes may still land in it, so it is kept for good.
_quarantine: list[Memory | None] = []


class Lanes:
    """`opener`: makes a transport of the name it is given."""

    def __init__(self, name: str, opener: Callable[[str], Transport]) -> None:
        self._name, self._opener = name, opener
        self._opened = 0
        self._lanes: list[Transport] = []
        self._memory: Memory | None = None
        self._registered = 0
        self._peers: dict[str, tuple[bytes, Transport, str]] = {}

    def suits(self, memory: Memory, agents: Sequence[Agent]) -> bool:
        """Whether `attach` may be called; `close` comes before it otherwise."""
        if not self._lanes:
            return True
        return (
            memory is self._memory and memory.nbytes == self._registered and len(self._lanes) >= _lanes_for(memory, len(agents))
        )

    def attach(self, memory: Memory, agents: Sequence[Agent]) -> None:
        """Be ready to read from `agents` into `memory`. Raises TransferError."""
        if not self._lanes:
            self._memory, self._registered = memory, memory.nbytes
            for _ in range(_lanes_for(memory, len(agents))):
                self._open(memory)
        for name in set(self._peers) - {agent.name for agent in agents}:
            self._disconnect(name)
        for agent in agents:
            if agent.name in self._peers:
                if self._peers[agent.name][0] == agent.metadata:
                    continue
                self._disconnect(agent.name)
            taken = Counter(id(lane) for _, lane, _ in self._peers.values())
            lane = min(self._lanes, key=lambda lane: taken[id(lane)])
            self._peers[agent.name] = (agent.metadata, lane, lane.connect(agent.metadata))

    def read(self, agent: Agent, reads: Reads, *, timeout: float, stall_timeout: float, progress: Progress) -> WireResult:
        """As a transport's own; sources of other lanes are read at the same time."""
        _, lane, peer = self._peers[agent.name]
        return lane.read(peer, reads, timeout=timeout, stall_timeout=stall_timeout, progress=progress)

    def close(self) -> None:
        """Give everything back. Raises what a transport raises that cannot be closed; its memory is kept for good then."""
        lanes, self._lanes, self._peers = self._lanes, [], {}
        memory, self._memory = self._memory, None
        failed: BaseException | None = None
        for lane in lanes:
            try:
                lane.close()
            except BaseException as error:  # a second close says nothing any more, so it is now or never
                failed = failed or error
        if failed is not None:
            _quarantine.append(memory)
            raise failed

    def _open(self, memory: Memory) -> None:
        self._opened += 1
        self._lanes.append(self._opener(f"{self._name}-{self._opened}"))
        try:
            self._lanes[-1].register(memory.regions())
        except BaseException:
            self.close()
            raise

    def _disconnect(self, name: str) -> None:
        _, lane, peer = self._peers.pop(name)
        lane.disconnect(peer)


def _lanes_for(memory: Memory, agents: int) -> int:
    return max(1, min(_MOST, agents, len(os.sched_getaffinity(0)))) if memory.mem == "DRAM" else 1
