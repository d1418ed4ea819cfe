"""The manifests of a version's shards, from whoever holds the shards to whoever reads them.

    with ManifestServer("10.0.0.7", asked=transport.nudge) as server:
        server.add(uid, "rank0", manifest)
        client.add_shard(uid, "rank0", worker_id, manifest_digest=manifest_digest(manifest), manifest_endpoint=server.endpoint)

    manifest = fetch_manifest(shard.manifest_endpoint, uid, "rank0", expected_digest=shard.manifest_digest)

A manifest is bytes here. Invariant: what `fetch_manifest` returns is what the shard's record promised: a port that changed hands, or a
holder that has moved on to another version, is `SourceLost`, and other bytes are `ManifestMismatch`.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, NoReturn

import grpc
import xxhash

from mx_common import envs
from mx_common.directory._channel import MAX_MESSAGE_BYTES, open_channel
from mx_common.directory._rank_server import RankServer
from mx_common.directory._version_rules import shown
from mx_common.directory.address import Address
from mx_common.errors import ConfigError, ManifestMismatch, SourceLost
from mx_common.wire import refit
from mx_common.wire.rpc import REFIT_WORKER_SERVICE, unary_calls

__all__ = ["ManifestServer", "fetch_manifest", "manifest_digest"]

log = logging.getLogger(__name__)

# room for the rest of the message
MAX_MANIFEST_BYTES = MAX_MESSAGE_BYTES - 65536


def manifest_digest(manifest: bytes) -> str:
    """XXH3-128 of a manifest, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(manifest)


class ManifestServer(RankServer):
    """Serves RefitWorkerService for the shards that this process holds.

    `host` is where others dial: a loopback host is bound as it is, any other on all interfaces, since an advertised name need not be
    an address of this machine. `port` 0: any free one. `asked` is called at each request, before the answer: a reader is about to read.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, asked: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            REFIT_WORKER_SERVICE,
            host=host,
            port=port,
            what="the manifest service of trained weights",
            advice="use port 0 for any",
        )
        self._asked = asked
        self._manifests: dict[tuple[str, str], tuple[bytes, str]] = {}

    def add(self, version_id: str, slot: str, manifest: bytes, digest: str = "") -> str:
        """Serve `manifest` for this shard from now on; returns its digest, computed unless given. Raises `ConfigError` for too much."""
        if len(manifest) > MAX_MANIFEST_BYTES:
            raise ConfigError(
                f"the manifest of slot {slot} has {len(manifest)} bytes, and one message takes {MAX_MANIFEST_BYTES}; publish fewer tensors "
                "a slot, from more slots"
            )
        digest = digest or manifest_digest(manifest)
        self._manifests[version_id, slot] = (manifest, digest)
        return digest

    def remove(self, version_id: str, slot: str) -> bool:
        """Serve it no more. False when it was not served."""
        return self._manifests.pop((version_id, slot), None) is not None

    def GetWeightVersionShardManifest(
        self, request: refit.GetWeightVersionShardManifestRequest, context: Any
    ) -> refit.GetWeightVersionShardManifestResponse:
        try:
            self._asked()
        except Exception:
            # the hook only hurries the transport; the reader is answered all the same
            log.exception("the hook of the manifest service failed")
        held = self._manifests.get((request.version_id, request.source_slot_id))
        if held is None:
            has = shown(f"{slot} of {version_id}" for version_id, slot in list(self._manifests)) or "none"
            _abort(
                context,
                grpc.StatusCode.NOT_FOUND,
                f"slot {request.source_slot_id!a} of version {request.version_id!a} is not held here (any more); held are {has}",
            )
        manifest, digest = held
        return refit.GetWeightVersionShardManifestResponse(manifest=manifest, manifest_digest=digest)


def fetch_manifest(endpoint: str, version_id: str, slot: str, expected_digest: str, *, timeout: float | None = None) -> bytes:
    """The manifest of a shard from its holder at `endpoint` (`host:port`), within `timeout` seconds (`MX_RPC_TIMEOUT` unless given).

    Raises `SourceLost` when nobody answers there or the holder does not have it (any more), and `ManifestMismatch` when what comes is
    not what the shard's record has the digest of. Digests of 32 hex digits are XXH3-128, of 64 SHA-256, and computed again here;
    others are compared as the holder states them.
    """
    started = time.monotonic()
    request = refit.GetWeightVersionShardManifestRequest(version_id=version_id, source_slot_id=slot)
    what = f"the manifest of slot {slot} of version {version_id} at {endpoint}"
    try:
        address = Address.parse(endpoint, what="manifest_endpoint of the shard")
    except ConfigError as error:
        raise SourceLost(f"{what} cannot be fetched: {error}") from error
    with closing(open_channel(address)) as channel:
        call = unary_calls(channel, REFIT_WORKER_SERVICE)["GetWeightVersionShardManifest"]
        try:
            response = call(request, timeout=timeout or envs.RPC_TIMEOUT.get())
        except grpc.RpcError as error:
            raise SourceLost(
                f"{what} was not fetched after {time.monotonic() - started:.1f} s ({error.code().name}: "
                f"{error.details() or 'no details'}); its process may have ended, and its versions with it: take the latest version, or "
                "look at the trainer's log"
            ) from error
    manifest: bytes = response.manifest
    for came in (response.manifest_digest, _computed(manifest, expected_digest)):
        if came != expected_digest:
            raise ManifestMismatch(
                f"{what} has digest {came}, and the directory's record of the shard says {expected_digest}: it is of another "
                "publication; take the latest version"
            )
    return manifest


def _computed(manifest: bytes, expected: str) -> str:
    if len(expected) == 32:
        return manifest_digest(manifest)
    if len(expected) == 64:
        return hashlib.sha256(manifest).hexdigest()
    return expected


def _abort(context: Any, code: Any, message: str) -> NoReturn:
    context.abort(code, message)
    raise AssertionError("abort always raises")
