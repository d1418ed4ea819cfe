"""Who watches with `mx top` sees a version and the refits to it advance, and nothing of them when they are over."""

from __future__ import annotations

import threading

import pytest

from tests.support.top import Gate, Top

EVERYTHING = 1 << 20


@pytest.mark.parametrize("path", ["reshard", "staged"])
def test_a_version_and_its_readers_are_seen_to_come_and_go(directory, trainer, receive, path):
    gate, ranks = Gate(), trainer(2)
    _, receiver = receive(path, fault=gate)
    installed = []
    with Top(directory.address) as top:
        ranks.publish(1, ranks=[0])
        staging = top.until(lambda frame: frame["versions"], "the version is there")
        refit = threading.Thread(target=lambda: installed.append(receiver.update(1, timeout=60)))
        refit.start()
        waiting = top.until(lambda frame: frame["activities"], "the receiver waits")
        ranks.publish(1, ranks=[1])
        reading = top.until(lambda frame: [one["stage"] for one in frame["activities"]] == ["wire"], "it reads")
        gate.open(3)
        further = top.until(lambda frame: frame["activities"][0]["bytes_done"] > 0, "bytes have arrived")
        gate.open(EVERYTHING)
        refit.join(60)
        over = top.until(lambda frame: not frame["activities"], "the refit is over")
    assert [(one["state"], one["missing"]) for one in staging["versions"]] == [("STAGING", ["rank1"])]
    assert [(one["stage"], one["version"], one["bytes_total"]) for one in waiting["activities"]] == [("wait", 1, 0)]
    (activity,) = reading["activities"]
    assert (activity["path"], activity["version"], activity["sources"]) == (path, 1, ["rank0", "rank1"])
    assert activity["bytes_total"] == installed[0].wire_bytes
    (version,) = further["versions"]
    assert (version["state"], version["open_leases"], version["uid"]) == ("READY", 1, activity["version_id"])
    assert version["reading"]["readers"] == 1
    assert version["reading"]["gbps"] == further["activities"][0]["gbps"] > 0
    assert [(one["open_leases"], one["reading"]["readers"]) for one in over["versions"]] == [(0, 0)]


def test_a_refit_that_fails_is_not_seen_any_more(directory, trainer, receive):
    _, receiver = receive()
    failed = []

    def refit():
        try:
            receiver.update(1, timeout=6)
        except Exception as error:
            failed.append(error)

    with Top(directory.address) as top:
        top.until(lambda frame: frame["reachable"], "it looks")
        thread = threading.Thread(target=refit)
        thread.start()
        top.until(lambda frame: frame["activities"], "the receiver waits")
        thread.join(60)
        top.until(lambda frame: not frame["activities"], "it has given up")
    assert "no version 1 of toy/refit was READY" in str(failed[0])
