"""What a version of trained weights goes through: its shards, its states, its readers' leases, and what a newer one does to it."""

from __future__ import annotations

import logging

import pytest

from mx_common.directory.versions import Refusal, Shard, State, VersionSpec, VersionStore
from mx_common.errors import ConfigError
from mx_common.wire import refit

STAGING, READY, RELEASING = State.STAGING, State.READY, State.RELEASING
BUCKET = ("s3://weights/7", 1)


@pytest.fixture
def versions(clock):
    return VersionStore(staging_seconds=600, clock=clock, wall=lambda: 5.0)


def shard(uid, slot="a", worker="w", digest="d"):
    return Shard(uid, slot, worker, digest, "10.0.0.1:9000")


def ready(versions, number, *, model="m", slots=("a",), **facts):
    uid = versions.create(VersionSpec(model, slots, number, **facts)).uid
    for slot in slots:
        versions.add_shard(shard(uid, slot))
    return uid


def state(versions, uid):
    try:
        return versions.get(uid).state
    except Refusal as refusal:
        if refusal.kind != "unknown":
            raise
        return None


def refused(kind, call, *arguments):
    with pytest.raises(Refusal) as caught:
        call(*arguments)
    assert caught.value.kind == kind
    return str(caught.value)


def test_the_states_are_those_of_the_wire():
    wire = {name.removeprefix("WEIGHT_VERSION_STATE_"): number for name, number in refit.WeightVersionState.items() if number}
    assert {one.name: one.value for one in State} == wire


def test_a_version_is_staging_until_its_last_slot_has_published(versions):
    made = versions.create(VersionSpec("m", ("a", "b"), 7))
    assert (made.state, made.missing, made.number, made.created_at_ms) == (STAGING, ("a", "b"), 7, 5000)
    assert versions.latest("m") is None
    half = versions.add_shard(shard(made.uid, "b"))
    assert (half.state, half.missing) == (STAGING, ("a",))
    whole = versions.add_shard(shard(made.uid, "a"))
    assert (whole.state, whole.missing, [s.slot for s in whole.shards]) == (READY, (), ["a", "b"])
    assert versions.latest("m").uid == made.uid


def test_every_rank_creating_with_one_key_gets_one_version_whatever_the_order_of_its_slots(versions):
    first = versions.create(VersionSpec("m", ("a", "b"), 1, idempotency_key="k"))
    assert versions.create(VersionSpec("m", ("b", "a"), 1, idempotency_key="k")).uid == first.uid
    assert versions.create(VersionSpec("other", ("a", "b"), 1, idempotency_key="k")).uid != first.uid
    assert versions.create(VersionSpec("m", ("a", "b"), 1)).uid != first.uid


@pytest.mark.parametrize("changed", [{"number": 2}, {"slots": ("a",)}, {"run": "r"}, {"uid": "mine"}, {"payload_format": 2}])
def test_a_key_that_is_used_again_for_something_else_is_refused(versions, changed):
    versions.create(VersionSpec("m", ("a", "b"), 1, idempotency_key="k"))
    other = VersionSpec(**{"model_name": "m", "slots": ("a", "b"), "number": 1, "idempotency_key": "k", **changed})
    assert "idempotency_key 'k' belongs to version" in refused("exists", versions.create, other)


def test_uids_are_unique_over_models(versions):
    spec = VersionSpec("m", ("a",), 1, uid="mine")
    assert versions.create(spec).uid == versions.create(spec).uid == "mine"
    assert "uid 'mine' belongs to" in refused("exists", versions.create, VersionSpec("n", ("a",), 1, uid="mine"))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"slots": ()}, "without expected source slots"),
        ({"slots": ("a", "b", "a")}, r"slots \['a'\] are named more than once"),
        ({"slots": ("",)}, "expected source slot has 0 bytes"),
        ({"model_name": ""}, "model_name has 0 bytes"),
        ({"run": "x" * 5000}, "run has 5000 bytes"),
        ({"ready": True}, "only a version in object storage is READY"),
        ({"ready": True, "object_storage": BUCKET}, "cannot be READY when it is made"),
        ({"number": -1}, "does not fit 64 bits"),
    ],
)
def test_a_version_that_could_never_be_ready_is_refused_when_it_is_asked_for(facts, said):
    with pytest.raises(ConfigError, match=said):
        VersionSpec(**{"model_name": "m", "slots": ("a",), **facts})


def test_a_version_in_object_storage_needs_no_slots_and_may_begin_ready(versions):
    assert versions.create(VersionSpec("m", (), 1, object_storage=BUCKET, ready=True)).state == READY
    staged = versions.create(VersionSpec("m", (), 2, object_storage=BUCKET))
    assert staged.state == STAGING
    assert versions.update_state(staged.uid, READY).state == READY


def test_a_slot_that_nobody_expects_is_refused_with_those_that_are(versions):
    uid = versions.create(VersionSpec("m", ("a", "b"), 1)).uid
    assert "expected are 'a', 'b'" in refused("invalid", versions.add_shard, shard(uid, "c"))
    assert "never was" in refused("unknown", versions.add_shard, shard("no such"))


def test_a_restarted_rank_replaces_its_shard_and_the_log_says_so(versions, caplog):
    uid = versions.create(VersionSpec("m", ("a", "b"), 1)).uid
    versions.add_shard(shard(uid, "a", "old", "d1"))
    with caplog.at_level(logging.WARNING):
        versions.add_shard(shard(uid, "a", "old", "d1"))
        assert caplog.messages == []
        versions.add_shard(shard(uid, "a", "new", "d2"))
    assert "worker new (manifest d2) replaces worker old (manifest d1)" in caplog.text
    assert [(s.worker_id, s.manifest_digest) for s in versions.get(uid).shards] == [("new", "d2")]


def test_a_ready_version_takes_no_other_shard_and_the_same_one_again(versions):
    uid = ready(versions, 1)
    before = versions.get(uid)
    assert versions.add_shard(shard(uid)) == before
    said = refused("state", versions.add_shard, shard(uid, worker="late"))
    assert f"version {uid} (number 1 of m) is READY and takes no shard: slot 'a' of worker 'late'" in said
    assert "keeps its shards" in refused("state", versions.remove_shard, uid, "a", "w")
    assert versions.get(uid) == before


def test_a_shard_is_taken_back_by_its_own_worker_only(versions):
    uid = versions.create(VersionSpec("m", ("a", "b"), 1)).uid
    versions.add_shard(shard(uid))
    assert not versions.remove_shard(uid, "a", "another")
    assert not versions.remove_shard(uid, "b", "w")
    assert versions.remove_shard(uid, "a", "w")
    assert versions.get(uid).missing == ("a", "b")


def test_one_layout_signature_stands_for_all_shards_that_carry_one(versions):
    def signature(number, signed):
        uid = versions.create(VersionSpec("m", tuple(signed), number)).uid
        for slot, one in signed.items():
            assert versions.get(uid).layout_signature == ""
            versions.add_shard(Shard(uid, slot, "w", "d", "h:1", layout_signature=one))
        return versions.get(uid).layout_signature

    assert signature(1, {"a": "x", "b": "y"}) == signature(2, {"b": "y", "a": "x"})
    assert signature(3, {"a": "y", "b": "x"}) != signature(4, {"a": "x", "b": "y"})
    assert signature(5, {"a": "x", "b": ""}) == ""


@pytest.mark.parametrize(
    ("begin", "to", "said"),
    [
        (STAGING, READY, "cannot go from STAGING to READY: 'b' published no shard"),
        (READY, STAGING, "cannot go from READY to STAGING"),
        (RELEASING, READY, "cannot go from RELEASING to READY"),
        (RELEASING, STAGING, "cannot go from RELEASING to STAGING"),
    ],
)
def test_no_state_follows_that_may_not(versions, begin, to, said):
    if begin == STAGING:
        uid = versions.create(VersionSpec("m", ("a", "b"), 1)).uid
        versions.add_shard(shard(uid))
    else:
        uid = ready(versions, 1)
        versions.lease(uid, "reader")
    if begin == RELEASING:
        versions.update_state(uid, RELEASING)
    assert said in refused("state", versions.update_state, uid, to)
    assert versions.update_state(uid, begin).state == begin


def test_a_deleted_version_lives_as_long_as_its_readers_and_takes_no_new_one(versions):
    uid = ready(versions, 1)
    lease = versions.lease(uid, "reader")
    assert versions.delete(uid).state == RELEASING
    assert versions.latest("m") is None
    assert "takes no new lease: it was deleted" in refused("state", versions.lease, uid, "another")
    assert versions.lease(uid, "reader").lease_id == lease.lease_id
    assert not versions.release(uid, lease.lease_id, "another")
    assert versions.release(uid, lease.lease_id, "reader")
    assert "is gone: it was deleted" in refused("unknown", versions.get, uid)
    assert not versions.release(uid, lease.lease_id, "reader")


def test_a_version_without_readers_is_gone_when_it_is_deleted(versions):
    uid = ready(versions, 1)
    assert versions.delete(uid).state == RELEASING
    assert state(versions, uid) is None
    assert "is gone" in refused("unknown", versions.delete, uid)


def test_a_version_that_is_not_ready_is_not_leased(versions):
    uid = versions.create(VersionSpec("m", ("a", "b"), 1)).uid
    versions.add_shard(shard(uid))
    assert "is STAGING: 'b' published no shard yet" in refused("state", versions.lease, uid, "reader")


def test_a_lease_lives_for_its_ttl_and_as_long_as_it_is_renewed(versions, clock):
    uid = ready(versions, 1)
    lease = versions.lease(uid, "reader", 60)
    clock.now += 59
    renewed = versions.renew(uid, lease.lease_id, "reader", 60)
    assert (renewed.lease_id, renewed.ttl, renewed.until_ms) == (lease.lease_id, 60, 65_000)
    clock.now += 59
    assert versions.get(uid).open_leases == 1
    clock.now += 1
    assert versions.get(uid).open_leases == 0
    assert "has ended: stop reading" in refused("unknown", versions.renew, uid, lease.lease_id, "reader", 60)


def test_the_time_of_a_lease_is_bounded(versions):
    uid = ready(versions, 1)
    assert versions.lease(uid, "a", 1 << 31).ttl == 3600
    assert versions.lease(uid, "b").ttl == 60


def test_the_last_lease_that_runs_out_ends_a_releasing_version(versions, clock):
    uid = ready(versions, 1)
    versions.lease(uid, "dead", 10)
    versions.delete(uid)
    clock.now += 10
    versions.sweep()
    assert state(versions, uid) is None


def test_revoking_ends_the_leases_at_once_and_the_version_with_them(versions):
    uid = ready(versions, 1)
    lease = versions.lease(uid, "reader")
    assert versions.revoke(uid) == 1
    assert "its publisher revoked its leases" in refused("unknown", versions.renew, uid, lease.lease_id, "reader")


def test_a_newer_version_supersedes_and_readers_of_the_old_one_finish(versions):
    old, held = ready(versions, 1), ready(versions, 2)
    assert state(versions, old) is None
    lease = versions.lease(held, "reader")
    staging = versions.create(VersionSpec("m", ("a",), 3)).uid
    assert versions.latest("m").uid == held
    versions.add_shard(shard(staging))
    assert versions.latest("m").uid == staging
    assert (state(versions, held), versions.get(held).why) == (RELEASING, f"version {staging} (number 3) superseded it")
    assert versions.renew(held, lease.lease_id, "reader").lease_id == lease.lease_id
    versions.release(held, lease.lease_id, "reader")
    assert state(versions, held) is None


def test_a_late_version_is_ready_but_never_the_latest(versions):
    late = versions.create(VersionSpec("m", ("a",), 1)).uid
    newest = ready(versions, 3)
    versions.add_shard(shard(late))
    later = ready(versions, 2)
    assert versions.latest("m").uid == newest
    assert [state(versions, uid) for uid in (late, later, newest)] == [None, READY, READY]
    assert [version.number for version in versions.versions_of("m")] == [3, 2]
    ready(versions, 4)
    assert state(versions, later) is None


def test_a_later_run_is_newer_whatever_its_numbers(versions):
    old = ready(versions, 100, run="first")
    resumed = ready(versions, 51, run="second")
    assert state(versions, old) is None
    straggler = ready(versions, 101, run="first")
    assert versions.latest("m").uid == resumed
    versions.delete(resumed)
    versions.delete(straggler)
    last = ready(versions, 52, run="second")
    ready(versions, 102, run="first")
    assert versions.latest("m").uid == last


def test_versions_without_a_number_count_on_even_after_all_are_gone(versions):
    first = versions.create(VersionSpec("m", ("a",)))
    assert first.number == 0
    versions.delete(first.uid)
    assert versions.create(VersionSpec("m", ("a",))).number == 1


def test_what_a_difference_builds_on_is_kept_with_it(versions):
    base = ready(versions, 1)
    delta = ready(versions, 2, base_version_id=base, payload_format=2)
    second = ready(versions, 3, base_version_id=delta, payload_format=2)
    assert [state(versions, uid) for uid in (base, delta, second)] == [READY, READY, READY]
    ready(versions, 4)
    assert [state(versions, uid) for uid in (base, delta, second)] == [None, None, None]


def test_models_do_not_touch_each_other(versions):
    one, other = ready(versions, 1, model="m"), ready(versions, 2, model="n")
    assert (versions.latest("m").uid, versions.latest("n").uid) == (one, other)
    assert versions.versions_of("unknown") == []


def test_a_version_that_never_gets_its_shards_is_dropped_and_its_slots_are_named(versions, clock, caplog):
    uid = versions.create(VersionSpec("m", ("a", "b", "c"), 1)).uid
    versions.add_shard(shard(uid, "b"))
    clock.now += 599
    assert state(versions, uid) == STAGING
    clock.now += 1
    with caplog.at_level(logging.WARNING):
        versions.sweep()
    assert "it was STAGING for 600 s, and 'a', 'c' published no shard" in caplog.text
    assert "'a', 'c' published no shard" in refused("unknown", versions.add_shard, shard(uid, "a"))


def test_a_ready_version_does_not_age(versions, clock):
    uid = ready(versions, 1)
    clock.now += 1e6
    assert state(versions, uid) == READY


def test_a_models_versions_are_bounded_and_the_newest_ready_one_stays(clock):
    versions = VersionStore(staging_seconds=600, max_versions=3, clock=clock)
    newest = ready(versions, 100)
    made = [versions.create(VersionSpec("m", ("a",), number)).uid for number in range(5)]
    assert len(versions.versions_of("m")) == 3
    assert [state(versions, uid) for uid in (newest, *made)] == [READY, None, None, None, STAGING, STAGING]


def test_a_thousand_versions_leave_nothing_behind_but_a_bounded_memory_of_them(versions):
    for number in range(3000):
        uid = ready(versions, number)
        versions.release(uid, versions.lease(uid, "reader").lease_id, "reader")
    assert (len(versions._entries), len(versions._keys), len(versions._gone)) == (1, 0, 1024)
    for number in range(3000):
        versions.delete(ready(versions, 0, model=f"model {number}", run="r", idempotency_key="k"))
    assert (len(versions._models), len(versions._keys)) == (1024, 0)


def test_a_registered_worker_is_forgotten_after_its_ttl(versions, clock):
    assert versions.register("w", "m", 10) == 15_000
    clock.now += 9
    versions.sweep()
    assert list(versions._workers) == ["w"]
    clock.now += 1
    versions.sweep()
    assert not versions._workers


@pytest.mark.parametrize("facts", [{"staging_seconds": 0}, {"staging_seconds": float("nan")}, {"keep": 0}, {"max_versions": 1}])
def test_a_store_that_keeps_nothing_is_refused(facts):
    with pytest.raises(ConfigError, match="keep no version alive"):
        VersionStore(**{"staging_seconds": 600, **facts})
