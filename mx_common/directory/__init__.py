"""Who has which weights: the directory's client and server, and the control services that sources and trainers run.

    from mx_common.directory import DirectoryClient, SourcePublisher, resolve

A target lists sources with a `DirectoryClient` at `resolve()` and reads from one under a `LeaseKeeper`; a source runs a
`WorkerServer` over its `Leases` and keeps itself known with a `SourcePublisher`. Versions of trained weights are made, found and
leased with a `RefitClient`; their manifests come from each rank's `ManifestServer`. A `Reporter` tells how far a load or a refit is, an
`ActivityClient` lists them. Invariant: weights never pass through here.
"""

from mx_common.directory.activities import Activity
from mx_common.directory.activity_client import ActivityClient
from mx_common.directory.activity_reporter import Doing, Reporter
from mx_common.directory.client import DirectoryClient, Listing
from mx_common.directory.embedded import ensure_directory, resolve
from mx_common.directory.heartbeat import SourcePublisher
from mx_common.directory.leases import Leases
from mx_common.directory.refit_client import RefitClient, VersionInfo, VersionLease
from mx_common.directory.refit_worker import ManifestServer, fetch_manifest
from mx_common.directory.server import DirectoryServer
from mx_common.directory.store import MemoryStore, Store
from mx_common.directory.versions import VersionStore
from mx_common.directory.worker_client import LeaseKeeper, WorkerClient
from mx_common.directory.worker_service import WorkerServer

__all__ = [
    "Activity",
    "ActivityClient",
    "DirectoryClient",
    "DirectoryServer",
    "Doing",
    "LeaseKeeper",
    "Leases",
    "Listing",
    "ManifestServer",
    "MemoryStore",
    "RefitClient",
    "Reporter",
    "SourcePublisher",
    "Store",
    "VersionInfo",
    "VersionLease",
    "VersionStore",
    "WorkerClient",
    "WorkerServer",
    "ensure_directory",
    "fetch_manifest",
    "resolve",
]
