"""The version that a receiver will read: chosen, leased, and its shard tables fetched and joined.

    with offered(client, job, version=None, timeout=60) as offer:
        offer.table, offer.number
        offer.check(verified)            # raises SourceLost once the lease may have ended, or what was read may have been overwritten

Invariant: what is offered was READY when the lease was granted, and the joined table has neither gap nor contradiction.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mx_common.directory.refit_client import RefitClient
from mx_common.directory.refit_worker import fetch_manifest
from mx_common.errors import SourceLost
from mx_common.refit.engine import RefitJob
from mx_common.refit.table import ShardTable
from mx_common.wire import refit

__all__ = ["Offer", "offered"]

_FETCHES_AT_ONCE = 16
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Offer:
    """One leased version: its number, its id in the directory, all its shards, and whether what was read so far may be used. Digests
    told a reader that compared them (`verified`); another one asks the sources, which take a manifest back before its memory is
    overwritten under readers."""

    number: int
    uid: str
    table: ShardTable
    check: Callable[[bool], None]


@contextlib.contextmanager
def offered(client: RefitClient, job: RefitJob, version: int | None, timeout: float) -> Iterator[Offer]:
    """`version`: exactly that one, None for the newest; waited for until it is READY. Raises SourceLost, naming what is missing."""
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        while True:
            found = client.wait_for(job.model_name, version, max(0.0, deadline - time.monotonic()))
            try:
                lease = stack.enter_context(client.lease(found.uid, job.worker_id))
                break
            except SourceLost:
                # between the two calls a newer one superseded it, or its trainer went on
                if version is not None or time.monotonic() >= deadline:
                    raise
                time.sleep(_LOOK_SECONDS)
        shards = sorted(client.list_shards(found.uid), key=lambda shard: shard.source_slot_id)  # plans are kept by row
        table = ShardTable.merged([ShardTable.decode(blob) for blob in _manifests(shards)])

        def check(verified: bool) -> None:
            lease.check()
            if verified:
                return
            try:
                _manifests(shards)
            except SourceLost as error:
                raise SourceLost(
                    f"without digests nobody knows whether what was read was overwritten meanwhile: {error}"
                ) from error

        yield Offer(found.number, found.uid, table, check)


def _manifests(shards: Sequence[refit.WeightVersionShard]) -> list[bytes]:
    """From their holders, in the order of the shards. Raises SourceLost and ManifestMismatch."""

    def fetch(shard: refit.WeightVersionShard) -> bytes:
        return fetch_manifest(
            shard.manifest_endpoint, shard.version_id, shard.source_slot_id, expected_digest=shard.manifest_digest
        )

    with ThreadPoolExecutor(min(_FETCHES_AT_ONCE, max(1, len(shards))), thread_name_prefix="mx-manifests") as pool:
        return list(pool.map(fetch, shards))
