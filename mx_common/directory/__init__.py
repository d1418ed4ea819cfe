"""Who has which weights: the directory's client and server, and the control service that every source runs.

    from mx_common.directory import DirectoryClient, SourcePublisher, resolve

A target lists sources with a `DirectoryClient` at `resolve()` and reads from one under a `LeaseKeeper`; a source runs a
`WorkerServer` over its `Leases` and keeps itself known with a `SourcePublisher`. Invariant: weights never pass through here.
"""

from mx_common.directory.client import DirectoryClient, Listing
from mx_common.directory.embedded import ensure_directory, resolve
from mx_common.directory.heartbeat import SourcePublisher
from mx_common.directory.leases import Leases
from mx_common.directory.server import DirectoryServer
from mx_common.directory.store import MemoryStore, Store
from mx_common.directory.worker_client import LeaseKeeper, WorkerClient
from mx_common.directory.worker_service import WorkerServer

__all__ = [
    "DirectoryClient",
    "DirectoryServer",
    "LeaseKeeper",
    "Leases",
    "Listing",
    "MemoryStore",
    "SourcePublisher",
    "Store",
    "WorkerClient",
    "WorkerServer",
    "ensure_directory",
    "resolve",
]
