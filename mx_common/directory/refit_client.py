"""Versions of trained weights as publishers and receivers see them: made, found, leased, waited for, released.

    with RefitClient("10.0.0.5:8001") as client:
        uid = client.create_version("org/model", 7, ["rank0", "rank1"], idempotency_key="run-a/7", run="run-a")     # any or every rank
        client.add_shard(uid, "rank0", worker_id, manifest_digest=digest, manifest_endpoint="10.0.0.7:9000")        # each rank its own
        client.wait_ready(uid, timeout=60)

        found = client.latest("org/model")
        with client.lease(found.uid, "engine-0") as lease:
            ...
            lease.check()

A plain ModelExpress server has no call to find versions (`latest`, `find`, `versions`) or to revoke leases: those say so, and the rest
works with it by uid. Invariant: no call outlives its timeout (`MX_RPC_TIMEOUT` unless given), and a wait outlives its own by one call
at most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from mx_common import envs
from mx_common.directory._call import Caller
from mx_common.directory._channel import open_channel
from mx_common.directory._version_lease import LeaseCalls, VersionLease, said_by, status_of
from mx_common.directory._version_records import State
from mx_common.directory._version_rules import shown
from mx_common.directory.address import Address
from mx_common.errors import DirectoryRefused, SourceLost
from mx_common.wire import refit, refit_ext
from mx_common.wire.rpc import REFIT_SERVICE, VERSION_SERVICE, unary_calls

__all__ = ["RefitClient", "VersionInfo", "VersionLease"]

FIRST_LOOK_SECONDS = 0.02
LAST_LOOK_SECONDS = 0.25


@dataclass(frozen=True)
class VersionInfo:
    """One version as the directory knew it. From a plain ModelExpress server `number` is -1 and `open_leases` None.

    `missing`: expected slots that have no shard. `order` counts the versions that the directory has created. `age_s`: seconds since
    then, by the directory's clock; None where it does not tell.
    """

    uid: str
    model_name: str
    number: int
    run: str
    state: State
    slots: tuple[str, ...]
    missing: tuple[str, ...]
    open_leases: int | None
    order: int
    layout_signature: str
    created_at_ms: int
    age_s: float | None = field(default=None, compare=False)

    def __str__(self) -> str:
        number = f"number {self.number} of " if self.number >= 0 else ""
        return f"version {self.uid} ({number}{self.model_name})"


class RefitClient:
    """Calls the versions of one directory at `address` (`host:port`); safe to share between threads.

    Every call raises `DirectoryUnavailable` when nobody answers in `timeout` seconds and `DirectoryRefused` when the answer is no;
    `SourceLost` when the version is gone or cannot be read. The constructor raises `ConfigError` for a malformed address and dials
    nothing.
    """

    def __init__(self, address: str, *, timeout: float | None = None) -> None:
        parsed = Address.parse(address, what="directory address")
        self.address = str(parsed)
        self._timeout = timeout or envs.RPC_TIMEOUT.get()
        self._channel = open_channel(parsed)
        self._caller = Caller(
            {**unary_calls(self._channel, REFIT_SERVICE), **unary_calls(self._channel, VERSION_SERVICE)},
            peer=f"directory {self.address}",
            advice="check that it runs there, and that the address (MX_SERVER_ADDRESS or the setting `server`) is right",
        )
        self._leases = LeaseCalls(self._caller, self._timeout)

    def create_version(self, model_name: str, number: int, slots: Sequence[str], *, idempotency_key: str, run: str = "") -> str:
        """The uid of version `number`, made by whichever rank comes first: the others get the same by the same key and contents.

        `slots`: every source slot that will publish a shard. `run` names one start of the trainer, and belongs into the key too: what a
        run that began later publishes is newer, whatever its numbers.
        """
        request = refit.CreateWeightVersionRequest(
            model_name=model_name,
            idempotency_key=idempotency_key,
            payload_format=refit.WEIGHT_PAYLOAD_FORMAT_FULL_TENSOR,
            expected_source_slots=slots,
            state=refit.WEIGHT_VERSION_STATE_STAGING,
            number=number,
            run=run,
        )
        response: refit.CreateWeightVersionResponse = self._call("CreateWeightVersion", request)
        return response.version.uid

    def add_shard(
        self,
        uid: str,
        slot: str,
        worker_id: str,
        *,
        manifest_digest: str,
        manifest_endpoint: str,
        tensor_count: int = 0,
        total_bytes: int = 0,
        layout_signature: str = "",
    ) -> State:
        """Publish the shard of `slot`; returns the version's state, READY after the last one. `manifest_endpoint`: `host:port`."""
        shard = refit.WeightVersionShard(
            version_id=uid,
            source_slot_id=slot,
            worker_id=worker_id,
            tensor_count=tensor_count,
            total_bytes=total_bytes,
            manifest_digest=manifest_digest,
            manifest_endpoint=manifest_endpoint,
            layout_signature=layout_signature,
        )
        request = refit.CreateWeightVersionShardRequest(shard=shard)
        response: refit.CreateWeightVersionShardResponse = self._call("CreateWeightVersionShard", request, uid=uid)
        return State(response.version.state)

    def list_shards(self, uid: str) -> list[refit.WeightVersionShard]:
        """The shards of a version that were published so far."""
        request = refit.ListWeightVersionShardsRequest(version_id=uid)
        response: refit.ListWeightVersionShardsResponse = self._call("ListWeightVersionShards", request, uid=uid)
        return list(response.shards)

    def latest(self, model_name: str) -> VersionInfo | None:
        """The newest READY version: of the latest run, the one with the highest number. None when the model has none."""
        response: refit_ext.LatestVersionResponse = self._ours(
            "LatestVersion", refit_ext.LatestVersionRequest(model_name=model_name)
        )
        return _info(response.version) if response.HasField("version") else None

    def versions(self, model_name: str = "") -> list[VersionInfo]:
        """Every version of a model that the directory has, newest first; without a name those of every model."""
        response: refit_ext.ListVersionsResponse = self._ours(
            "ListVersions", refit_ext.ListVersionsRequest(model_name=model_name)
        )
        return [_info(summary, now_ms=response.server_time_ms) for summary in response.versions]

    def find(self, model_name: str, number: int | None = None) -> VersionInfo | None:
        """The READY version of that number, of the latest run that has one; None: the newest. None when there is none."""
        if number is None:
            return self.latest(model_name)
        of_number = (found for found in self.versions(model_name) if found.number == number)
        return next((found for found in of_number if found.state == State.READY), None)

    def wait_for(self, model_name: str, number: int | None, timeout: float) -> VersionInfo:
        """What `find` finds, waited for `timeout` seconds. Raises `SourceLost`, with `why_not_ready`."""
        deadline = time.monotonic() + timeout
        pause = FIRST_LOOK_SECONDS
        while (found := self.find(model_name, number)) is None:
            if time.monotonic() >= deadline:
                raise SourceLost(self.why_not_ready(model_name, number, timeout))
            pause = _paused(pause, deadline)
        return found

    def why_not_ready(self, model_name: str, number: int | None, waited: float) -> str:
        """What `find` lacks, in words, for whoever has waited for `waited` seconds: the slots that never published, by name."""
        known = self.versions(model_name)
        wanted = "no version" if number is None else f"no version {number}"
        if number is not None:
            known = [found for found in known if found.number == number] or known
        for found in known:
            if found.state == State.STAGING and number in (None, found.number):
                return _missing(found, waited)
        have = ", ".join(f"{found.number} ({found.state.name})" for found in known[:8])
        return (
            f"{wanted} of {model_name} was READY in the directory {self.address} within {waited:g} s; it knows {have or 'none at all'}: "
            "check that the trainer runs (a version lives as long as the processes that hold it), and publishes under this model name, to "
            "this directory"
        )

    def get(self, uid: str) -> VersionInfo:
        """The version of a uid. Raises `SourceLost`, with what became of it, when it is gone."""
        return self._get(uid, self._timeout)

    def lease(self, uid: str, worker_id: str, ttl: float | None = None) -> VersionLease:
        """A context manager that holds a READY version for this reader. `ttl`: seconds without renewal, `MX_LEASE_SECONDS` unless given.

        A reader has one lease on a version: give concurrent readers `worker_id`s of their own.
        """
        return VersionLease(self._leases, uid, worker_id, max(1, math.ceil(ttl or envs.LEASE_SECONDS.get())))

    def delete(self, uid: str) -> bool:
        """Release a version: it takes no new readers, and is gone with its last lease. False when it is gone already."""
        try:
            self._call("DeleteWeightVersion", refit.DeleteWeightVersionRequest(uid=uid), uid=uid)
        except SourceLost:
            return False
        return True

    def revoke(self, uid: str) -> int:
        """Release a version and end its leases now: readers learn it at their next `check`. Returns how many leases ended."""
        try:
            response: refit_ext.RevokeLeasesResponse = self._ours(
                "RevokeLeases", refit_ext.RevokeLeasesRequest(version_id=uid), uid=uid
            )
        except SourceLost:
            return 0
        return response.revoked

    def wait_ready(self, uid: str, timeout: float) -> VersionInfo:
        """The version once it is READY. Raises `SourceLost` after `timeout` seconds, naming the slots that never published."""
        deadline = time.monotonic() + timeout
        pause = FIRST_LOOK_SECONDS
        while True:
            found = self._get(uid, self._within(deadline))
            if found.state == State.READY:
                return found
            if found.state == State.RELEASING:
                raise SourceLost(f"{found} was released before it was seen READY; publish again, or take the latest version")
            if time.monotonic() >= deadline:
                raise SourceLost(_missing(found, timeout))
            pause = _paused(pause, deadline)

    def wait_unleased(self, uid: str, timeout: float) -> bool:
        """Whether no reader held the version at some moment within `timeout` seconds. `delete` it first, or a new one may follow."""
        deadline = time.monotonic() + timeout
        pause = FIRST_LOOK_SECONDS
        while True:
            try:
                # a server that does not tell its leases forgets the version with the last one
                if self._get(uid, self._within(deadline)).open_leases == 0:
                    return True
            except SourceLost:
                return True
            if time.monotonic() >= deadline:
                return False
            pause = _paused(pause, deadline)

    def close(self) -> None:
        """Close the connection; calls in flight end with `DirectoryUnavailable`."""
        self._channel.close()

    def __enter__(self) -> RefitClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _within(self, deadline: float) -> float:
        # at least a second: the last look of a wait must not fail for want of time
        return min(self._timeout, max(1.0, deadline - time.monotonic()))

    def _get(self, uid: str, timeout: float) -> VersionInfo:
        try:
            response: refit_ext.ListVersionsResponse = self._call(
                "ListVersions", refit_ext.ListVersionsRequest(uid=uid), uid=uid, timeout=timeout
            )
        except DirectoryRefused as error:
            if status_of(error) != grpc.StatusCode.UNIMPLEMENTED:
                raise
        else:
            return _info(response.versions[0])
        plain = self._call("GetWeightVersion", refit.GetWeightVersionRequest(uid=uid), uid=uid, timeout=timeout).version
        have = {shard.source_slot_id for shard in self.list_shards(uid)}
        missing = [slot for slot in plain.expected_source_slots if slot not in have]
        return _info(refit_ext.VersionSummary(version=plain, missing_slots=missing), ours=False)

    def _ours(self, name: str, request: Any, *, uid: str = "") -> Any:
        try:
            return self._call(name, request, uid=uid)
        except DirectoryRefused as error:
            if status_of(error) != grpc.StatusCode.UNIMPLEMENTED:
                raise
            raise DirectoryRefused(
                f"{name} is a call of {VERSION_SERVICE.full_name}, which the server at {self.address} does not have: a plain ModelExpress "
                "server can neither find versions nor revoke leases; run `mx server` for refits, or name each version by its uid"
            ) from error

    def _call(self, name: str, request: Any, *, uid: str = "", timeout: float | None = None) -> Any:
        try:
            return self._caller.call(name, request, timeout=timeout or self._timeout, retry=True)
        except DirectoryRefused as error:
            if uid and status_of(error) == grpc.StatusCode.NOT_FOUND:
                raise SourceLost(f"version {uid} cannot be used: {said_by(error)}") from error
            raise


def _paused(pause: float, deadline: float) -> float:
    time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
    return min(2 * pause, LAST_LOOK_SECONDS)


def _missing(found: VersionInfo, waited: float) -> str:
    if not found.missing:
        return f"{found} was not READY within {waited:g} s, though no slot is missing: its publisher has not said that it is complete"
    several = "slots" if len(found.missing) > 1 else "slot"
    return (
        f"{found} is not READY: trainer rank {several} {shown(found.missing)} never published within {waited:g} s "
        f"({len(found.slots) - len(found.missing)} of {len(found.slots)} did); look at the log of that rank"
    )


def _info(summary: refit_ext.VersionSummary, *, ours: bool = True, now_ms: int = 0) -> VersionInfo:
    version = summary.version
    return VersionInfo(
        uid=version.uid,
        model_name=version.model_name,
        number=version.number if version.HasField("number") else -1,
        run=version.run,
        state=State(version.state),
        slots=tuple(version.expected_source_slots),
        missing=tuple(summary.missing_slots),
        open_leases=summary.open_leases if ours else None,
        order=summary.order,
        layout_signature=version.layout_signature,
        created_at_ms=version.created_at_unix_ms,
        age_s=max(0, now_ms - version.created_at_unix_ms) / 1000 if now_ms else None,
    )
