"""Who watches with `mx top` sees a load advance, on both ends, and nothing of it when it is over."""

from __future__ import annotations

import threading

import pytest

from mx_common.load import Loaded, Source, load, loader, source
from mx_common.transport.local import LocalTransport
from tests.support.top import Gate, Top
from tests.support.toy import ToyEngine, content, holds, job, log

EVERYTHING = 1000


@pytest.fixture
def gate(monkeypatch):
    """What the target reads waits for it."""
    gate = Gate()
    monkeypatch.setattr(loader, "open_transport", lambda name: LocalTransport(name, fault=gate))
    monkeypatch.setattr(source, "open_transport", LocalTransport)
    yield gate
    gate.open(EVERYTHING)


def test_a_load_is_seen_to_advance_and_to_end(directory, gate):
    serving = Source.start(job("source-1"), Loaded(content(3, 8, 1 << 20)), ready=lambda: True, serving=None, log=log)
    loaded = []
    target = threading.Thread(target=lambda: loaded.append(load(job("target-1", fallback="none"), ToyEngine(), log)))
    with Top(directory.address) as top:
        top.until(lambda frame: [one["status"] for one in frame["sources"]] == ["READY"], "the source is there")
        target.start()
        begun = top.until(lambda frame: [one["stage"] for one in frame["activities"]] == ["wire"], "the load is there")
        gate.open(2)
        further = top.until(lambda frame: frame["activities"][0]["bytes_done"] > 0, "bytes have arrived")
        gate.open(2)
        done = further["activities"][0]["bytes_done"]
        top.until(lambda frame: frame["activities"][0]["bytes_done"] > done, "more bytes have arrived")
        gate.open(EVERYTHING)
        target.join(60)
        over = top.until(lambda frame: not frame["activities"], "the load is over")
    assert holds(loaded[0].tensors, 3)
    (activity,) = begun["activities"]
    assert (activity["worker_id"], activity["sources"], activity["stage"]) == ("target-1", ["source-1"], "wire")
    assert (activity["path"], activity["version"], activity["bytes_done"]) == ("load", None, 0)
    assert activity["bytes_total"] == sum(tensor.nbytes for tensor in loaded[0].tensors.values())
    assert further["sources"][0]["reading"]["readers"] == 1
    assert further["sources"][0]["reading"]["gbps"] == further["activities"][0]["gbps"] > 0
    assert over["sources"][0]["reading"] == {"readers": 0, "gbps": 0}
    loaded[0].transport.close()
    serving.close()
