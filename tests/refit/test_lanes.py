"""Sources are read side by side, through one transport or several."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from mx_common.errors import TransferError
from mx_common.refit._lanes import Lanes
from mx_common.refit._memory import Memory
from mx_common.refit.table import Agent
from mx_common.transport import LocalTransport, Reads, Regions

SIZE = 1000


class Source:
    """An agent that holds `SIZE` bytes of one value."""

    def __init__(self, slot, value):
        self.data = torch.full((SIZE,), value, dtype=torch.uint8)
        self.transport = LocalTransport(f"source-{slot}-{value}")
        self.transport.register(regions_of(self.data))
        self.agent = Agent(slot, self.transport.name, self.transport.metadata())

    def reads(self, into):
        one = lambda number: np.array([number], dtype=np.uint64)  # noqa: E731
        return Reads(one(self.data.data_ptr()), one(into.data_ptr()), one(SIZE), one(0), one(0))


class Opened:
    """Opens transports and remembers them. `stuck`: names of those that cannot be closed; `fault`: as of a transport."""

    def __init__(self):
        self.made = []
        self.ended = []
        self.stuck = set()
        self.fault = None

    def __call__(self, name):
        self.made.append(Transport(name, self))
        return self.made[-1]


class Transport(LocalTransport):
    def __init__(self, name, opened):
        super().__init__(name, fault=opened.fault)
        self._opened = opened

    def close(self):
        super().close()
        self._opened.ended.append(self.name)
        if self.name in self._opened.stuck:
            raise TransferError(f"{self.name} is still referenced")


@pytest.fixture
def opened():
    opened = Opened()
    yield opened
    for one in opened.made:
        LocalTransport.close(one)


@pytest.fixture
def sources():
    made = [Source(f"rank{n}", n + 1) for n in range(3)]
    yield made
    for one in made:
        one.transport.close()


@pytest.fixture
def memory():
    return Memory(torch.device("cpu"))


def regions_of(tensor):
    column = lambda number: np.array([number], dtype=np.uint64)  # noqa: E731
    return Regions(column(tensor.data_ptr()), column(tensor.nbytes), column(0))


def read(lanes, source, into):
    lanes.read(source.agent, source.reads(into), timeout=10, stall_timeout=10, progress=lambda done, total: None)


def cores(monkeypatch, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))


@pytest.mark.parametrize(("count", "lanes_expected"), [(1, 1), (2, 2), (3, 3), (64, 3)])
def test_host_memory_has_a_lane_for_each_source_as_far_as_cores_go(count, lanes_expected, opened, sources, memory, monkeypatch):
    cores(monkeypatch, count)
    area = memory.area(3 * SIZE)
    lanes = Lanes("receiver", opened)
    lanes.attach(memory, [source.agent for source in sources])
    assert len(opened.made) == lanes_expected
    for source, part in zip(sources, area.view(3, SIZE), strict=True):
        read(lanes, source, part)
    assert area.view(3, SIZE)[:, 0].tolist() == [1, 2, 3]
    assert area.view(3, SIZE)[:, -1].tolist() == [1, 2, 3]
    lanes.close()
    assert opened.ended == [one.name for one in opened.made]


def test_sources_of_different_lanes_are_read_at_the_same_time(opened, sources, memory, monkeypatch):
    cores(monkeypatch, 2)
    both = threading.Barrier(2, timeout=20)
    opened.fault = lambda done: both.wait()
    area = memory.area(2 * SIZE)
    lanes = Lanes("receiver", opened)
    lanes.attach(memory, [source.agent for source in sources[:2]])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda n: read(lanes, sources[n], area[n * SIZE :]), range(2)))


def test_a_devices_memory_has_one_lane(opened, sources, memory, monkeypatch):
    cores(monkeypatch, 64)
    memory.area(SIZE)
    monkeypatch.setattr(Memory, "mem", property(lambda self: "VRAM"))  # no device is here; nothing is read
    monkeypatch.setattr(LocalTransport, "register", lambda self, regions: None)
    Lanes("receiver", opened).attach(memory, [source.agent for source in sources])
    assert len(opened.made) == 1


def test_sources_come_and_go_without_another_lane(opened, sources, memory, monkeypatch):
    cores(monkeypatch, 2)
    area = memory.area(SIZE)
    lanes = Lanes("receiver", opened)
    first, second, third = sources
    lanes.attach(memory, [first.agent, second.agent])
    assert lanes.suits(memory, [third.agent, second.agent])
    lanes.attach(memory, [third.agent, second.agent])
    read(lanes, third, area)
    assert area.tolist() == [3] * SIZE
    with pytest.raises(KeyError):
        read(lanes, first, area)
    assert len(opened.made) == 2


def test_a_source_that_comes_later_takes_the_lane_with_the_fewest(opened, sources, memory, monkeypatch):
    cores(monkeypatch, 2)
    both = threading.Barrier(2, timeout=20)
    opened.fault = lambda done: both.wait()
    area = memory.area(2 * SIZE)
    lanes = Lanes("receiver", opened)
    first, second, third = sources
    for agents in ([first, second], [second], [second, third]):
        lanes.attach(memory, [source.agent for source in agents])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda source, at: read(lanes, source, area[at:]), (second, third), (0, SIZE)))


def test_a_lane_that_cannot_register_the_memory_leaves_none_open(opened, sources, memory, monkeypatch):
    cores(monkeypatch, 2)
    memory.area(SIZE)
    lanes, register = Lanes("receiver", opened), LocalTransport.register

    def failing(transport, regions):
        if len(opened.made) == 2:
            raise TransferError("no more registrations")
        register(transport, regions)

    agents = [source.agent for source in sources]
    with monkeypatch.context() as patched:
        patched.setattr(LocalTransport, "register", failing)
        with pytest.raises(TransferError, match="no more registrations"):
            lanes.attach(memory, agents)
    assert opened.ended == [one.name for one in opened.made]
    lanes.attach(memory, agents)
    assert len(opened.made) == 4


def test_a_source_with_other_metadata_is_connected_again(opened, sources, memory):
    area = memory.area(SIZE)
    lanes = Lanes("receiver", opened)
    source = sources[0]
    lanes.attach(memory, [source.agent])
    source.data = torch.full((SIZE,), 9, dtype=torch.uint8)
    source.transport.register(regions_of(source.data))
    with pytest.raises(TransferError):
        read(lanes, source, area)
    source.agent = Agent(source.agent.slot, source.agent.name, source.transport.metadata())
    lanes.attach(memory, [source.agent])
    read(lanes, source, area)
    assert area.tolist() == [9] * SIZE


def test_other_memory_and_more_sources_than_lanes_need_new_ones(opened, sources, memory, monkeypatch):
    cores(monkeypatch, 2)
    memory.area(SIZE)
    lanes = Lanes("receiver", opened)
    agents = [source.agent for source in sources]
    assert lanes.suits(memory, agents), "nothing is open yet"
    lanes.attach(memory, agents[:1])
    assert lanes.suits(memory, agents[:1])
    assert not lanes.suits(memory, agents[:2])
    assert not lanes.suits(Memory(torch.device("cpu")), agents[:1])
    memory.area(SIZE)
    assert not lanes.suits(memory, agents[:1]), "a buffer that is registered nowhere"


def test_a_lane_that_cannot_be_closed_keeps_no_other_open(opened, sources, memory, monkeypatch):
    cores(monkeypatch, 2)
    memory.area(SIZE)
    lanes = Lanes("receiver", opened)
    lanes.attach(memory, [source.agent for source in sources[:2]])
    opened.stuck.add(opened.made[0].name)
    with pytest.raises(TransferError, match="still referenced"):
        lanes.close()
    assert opened.ended == [one.name for one in opened.made]
    lanes.close()  # nothing is left to close
