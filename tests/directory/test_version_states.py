"""Whatever publishers, readers and time do to the versions of a model, and in whatever order, the promises of the store hold."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from mx_common.directory.versions import Refusal, Shard, State, VersionSpec, VersionStore

SLOTS = ("a", "b")
STAGING_SECONDS, MOST = 100, 6
# which of the versions an event is about: mostly one that lives
which = st.integers(0, MOST)
numbers, runs, slot_sets = st.integers(0, 5), st.sampled_from("xy"), st.sampled_from([SLOTS, ("a",)])


class Versions(RuleBasedStateMachine):
    """`shards` is what each version held when it was first seen READY; `ends` when each lease runs out unless renewed."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.store = VersionStore(staging_seconds=STAGING_SECONDS, max_versions=MOST, clock=lambda: self.now)
        self.shards, self.ends, self.runs, self.seen = {}, {}, [], []

    def look(self, uid):
        try:
            return self.store.get(uid)
        except Refusal as refusal:
            return self.expected(refusal, ("unknown",))

    def allowed(self, call, *arguments, kinds=("unknown", "state")):
        try:
            return call(*arguments)
        except Refusal as refusal:
            return self.expected(refusal, kinds)

    def expected(self, refusal, kinds):
        if refusal.kind not in kinds:
            raise refusal

    def uid(self, which):
        living = sorted(self.store.versions_of("m"), key=lambda version: version.order)
        return living[which].uid if which < len(living) else self.seen[which % len(self.seen)]

    @initialize()
    def begin(self):
        self.whole(0, "x", ("a",))

    @rule(number=numbers, run=runs, slots=slot_sets)
    def create(self, number, run, slots):
        if run not in self.runs:
            self.runs.append(run)
        self.seen.append(self.store.create(VersionSpec("m", slots, number, run)).uid)

    @rule(number=numbers, run=runs, slots=slot_sets)
    def whole(self, number, run, slots):
        self.create(number, run, slots)
        for slot in slots:
            self.add(self.seen[-1], slot, "v")

    @rule(which=which, slot=st.sampled_from(SLOTS), worker=st.sampled_from("vw"))
    def publish(self, which, slot, worker):
        self.add(self.uid(which), slot, worker)

    def add(self, uid, slot, worker):
        before = self.look(uid)
        others = {version.uid: version for version in self.store.versions_of("m")}
        after = self.allowed(self.store.add_shard, Shard(uid, slot, worker, "d", "h:1"), kinds=("unknown", "state", "invalid"))
        if before is not None and before.state != State.STAGING:
            assert after in (None, before)
        if after is not None and before.state == State.STAGING and after.state == State.READY:
            self.superseded(after, others)

    def superseded(self, newer, others):
        for uid, old in others.items():
            if old.state == State.READY and uid != newer.uid:
                now = self.look(uid)
                if self.rank(old) > self.rank(newer):
                    assert now == old
                else:
                    assert now is None if not old.open_leases else now.state == State.RELEASING

    def rank(self, version):
        return (self.runs.index(version.spec.run), version.number, version.order)

    @rule(which=which, slot=st.sampled_from(SLOTS), worker=st.sampled_from("vw"))
    def take_back(self, which, slot, worker):
        self.allowed(self.store.remove_shard, self.uid(which), slot, worker)

    @rule(which=which, state=st.sampled_from(State))
    def move(self, which, state):
        uid = self.uid(which)
        before = self.look(uid)
        after = self.allowed(self.store.update_state, uid, state)
        if after is not None:
            assert after.state == state
            assert before.state == state or (before.state, state) in {
                (State.STAGING, State.READY),
                (State.STAGING, State.RELEASING),
                (State.READY, State.RELEASING),
            }

    @rule(which=which, revoke=st.booleans())
    def end(self, which, revoke):
        uid = self.uid(which)
        self.allowed(self.store.revoke if revoke else self.store.delete, uid)
        left = self.look(uid)
        assert left is None or (left.open_leases and not revoke)

    @rule(target=leases, which=which, reader=st.sampled_from("pqr"), ttl=st.integers(1, 40))
    def lease(self, which, reader, ttl):
        uid = self.uid(which)
        before = self.look(uid)
        lease = self.allowed(self.store.lease, uid, reader, ttl)
        if lease is None:
            return (uid, "none", reader)
        assert before.state == State.READY or before.open_leases == self.store.get(uid).open_leases
        self.ends[lease.lease_id] = self.now + ttl
        return (uid, lease.lease_id, reader)

    @rule(lease=leases, ttl=st.integers(1, 40))
    def renew(self, lease, ttl):
        uid, lease_id, reader = lease
        renewed = self.allowed(self.store.renew, uid, lease_id, reader, ttl, kinds=("unknown",))
        assert renewed is None or self.ends[lease_id] > self.now
        if renewed is not None:
            self.ends[lease_id] = self.now + ttl

    @rule(lease=leases)
    def release(self, lease):
        uid, lease_id, reader = lease
        if self.store.release(uid, lease_id, reader):
            assert self.ends.pop(lease_id) > self.now

    @rule(seconds=st.integers(1, 60))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def sweep(self):
        self.store.sweep()

    @invariant()
    def what_is_ready_is_whole_and_never_changes(self):
        for version in self.store.versions_of("m"):
            if version.state == State.READY:
                assert version.missing == ()
                assert self.shards.setdefault(version.uid, version.shards) == version.shards
            elif version.uid in self.shards:
                assert (version.state, version.shards) == (State.RELEASING, self.shards[version.uid])

    @invariant()
    def what_is_releasing_has_a_reader(self):
        assert all(v.open_leases for v in self.store.versions_of("m") if v.state == State.RELEASING)

    @invariant()
    def the_latest_is_the_newest_that_is_ready(self):
        ready = [version for version in self.store.versions_of("m") if version.state == State.READY]
        latest = self.store.latest("m")
        assert latest == max(ready, key=self.rank, default=None)

    @invariant()
    def nothing_outlives_its_time_or_its_bound(self):
        living = self.store.versions_of("m")
        assert len(living) <= MOST
        assert sum(v.open_leases for v in living) <= sum(end > self.now for end in self.ends.values())
        assert {version.uid for version in living} <= set(self.seen)


Versions.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestNoOrderOfEventsBreaksAPromise = Versions.TestCase
