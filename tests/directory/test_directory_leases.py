"""How long a lease lives, and what waiting for the last reader promises."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx_common.directory import Leases
from mx_common.errors import ConfigError


def test_a_lease_ends_when_it_is_released(clock):
    leases = Leases(60, clock)
    lease = leases.grant()
    assert leases.open_count() == 1
    assert leases.release(lease)
    assert leases.open_count() == 0
    assert not leases.release(lease)


def test_a_lease_outlives_its_reader_by_its_ttl_and_no_longer(clock):
    leases = Leases(60, clock)
    leases.grant()
    clock.now += 59.9
    assert leases.open_count() == 1
    clock.now += 0.1
    assert leases.open_count() == 0
    assert leases.wait_idle(0)


def test_a_renewed_lease_lives_on_and_an_ended_one_cannot_be_renewed(clock):
    leases = Leases(60, clock)
    lease = leases.grant()
    for _ in range(5):
        clock.now += 59
        assert leases.renew(lease)
    clock.now += 60
    assert not leases.renew(lease)
    assert not leases.renew("never granted")


def test_a_reader_that_never_renews_can_be_given_longer(clock):
    leases = Leases(60, clock)
    leases.grant(600)
    clock.now += 599
    assert leases.open_count() == 1
    clock.now += 1
    assert leases.open_count() == 0


def test_waiting_ends_with_the_release_of_the_last_lease():
    leases = Leases(60)
    first, second = leases.grant(), leases.grant()
    idle = []
    waiter = threading.Thread(target=lambda: idle.append(leases.wait_idle(30)))
    waiter.start()
    leases.release(first)
    assert not leases.wait_idle(0.05)
    leases.release(second)
    waiter.join(10)
    assert idle == [True]


def test_waiting_ends_with_the_expiry_of_a_dead_readers_lease():
    leases = Leases(1)
    leases.grant()
    assert not leases.wait_idle(0.1)
    assert leases.wait_idle(30)


def test_closed_leases_admit_no_new_reader_and_let_the_old_ones_finish(clock):
    leases = Leases(60, clock)
    lease = leases.grant()
    leases.close()
    assert leases.grant() is None
    assert leases.renew(lease)
    assert leases.release(lease)
    leases.reopen()
    assert leases.grant() is not None


@given(st.lists(st.tuples(st.sampled_from(["grant", "renew", "release", "pass"]), st.integers(0, 9)), max_size=40))
def test_leases_follow_a_table_of_end_times(steps):
    now = [0.0]
    leases, ends, names = Leases(10, lambda: now[0]), {}, []
    for step, which in steps:
        name = names[which % len(names)] if names else "none"
        alive = ends.get(name, 0.0) > now[0]
        if step == "grant":
            names.append(leases.grant())
            ends[names[-1]] = now[0] + 10
        elif step == "renew":
            assert leases.renew(name) == alive
            if alive:
                ends[name] = now[0] + 10
        elif step == "release":
            assert leases.release(name) == alive
            ends.pop(name, None)
        else:
            now[0] += which
        assert leases.open_count() == sum(end > now[0] for end in ends.values())


@pytest.mark.parametrize("ttl", [0, -1, 0.5, float("nan"), float("inf")])
def test_a_lease_time_that_cannot_work_is_refused(ttl):
    with pytest.raises(ConfigError, match="MX_LEASE_SECONDS"):
        Leases(ttl)
