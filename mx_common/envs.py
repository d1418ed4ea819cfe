"""Every environment variable of the pack, in one table.

The configuration page (`docs/configuration.md`) and `mx envs` are made from this table, and no other file reads the
process environment. Values are read at call time, so a test or a long-lived process sees a change.

    from mx_common import envs
    envs.TRANSFER_TIMEOUT.get()      # float seconds; ConfigError names the variable, its value and what is allowed

Invariant: a bad value is never used. Settings that decide *what happens* raise `ConfigError`; settings that only tune or
observe (weights, bounds of the floor, topology) fall back to their default with one warning that names the value.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from mx_common._env_rows import Rows, Setting, Var

__all__ = ["TABLE", "Setting", "Var", "runtime_dir", "set_default", "unknown_names"]

_rows = Rows(os.environ)
TABLE = _rows.table

# Directory -----------------------------------------------------------------------------------------------------------
SERVER_ADDRESS = _rows.address(
    "MX_SERVER_ADDRESS",
    "",
    "the directory; unset: the pack hosts one itself on this machine",
    shown_default="(unset: embedded)",
)
EMBEDDED_ADDRESS = _rows.address(
    "MX_EMBEDDED_ADDRESS", "127.0.0.1:8001", "where the embedded directory binds and is looked for"
)
RPC_TIMEOUT = _rows.number("MX_RPC_TIMEOUT", 10, "seconds one call may take, retries included", "Directory", above=True)
HEARTBEAT_SECONDS = _rows.number(
    "MX_HEARTBEAT_SECONDS",
    30,
    "seconds between two heartbeats of a source; at most half of MX_STALE_SECONDS",
    "Directory",
    above=True,
)
STALE_SECONDS = _rows.number(
    "MX_STALE_SECONDS",
    90,
    "seconds of silence after which the directory calls a source STALE; read by the directory",
    "Directory",
    above=True,
)
REMOVE_SECONDS = _rows.number(
    "MX_REMOVE_SECONDS",
    600,
    "seconds of silence after which the directory forgets a source; read by the directory",
    "Directory",
    above=True,
)
VERSION_STAGING_SECONDS = _rows.number(
    "MX_VERSION_STAGING_SECONDS",
    600,
    "seconds a version of trained weights may wait for its shards before it is dropped; read by the directory",
    "Directory",
    above=True,
)
ADVERTISE_HOST = _rows.text(
    "MX_ADVERTISE_HOST",
    "",
    "host or address under which other nodes reach this worker",
    "Directory",
    shown_default="(unset: the address that routes to the directory)",
)
WORKER_PORT = _rows.integer(
    "MX_WORKER_PORT",
    0,
    "first port of the per-worker control service, plus the rank; 0: any free port",
    "Directory",
    high=65535,
)
RUNTIME_DIR = _rows.text(
    "MX_RUNTIME_DIR",
    "",
    "directory for small host-local files (serving load, metrics)",
    "Directory",
    shown_default="(unset: mx-<uid> in XDG_RUNTIME_DIR or the temporary directory)",
)

# Selection -----------------------------------------------------------------------------------------------------------
SOURCE_SELECTOR = _rows.text("MX_P2P_SOURCE_SELECTOR", "random", "policy that orders the sources", "Selection")
LOAD_WEIGHT = _rows.number(
    "MX_P2P_LOAD_WEIGHT", 1.0, "weight of a source's load in load_aware", "Selection", strict=False, clamp=True
)
TOPOLOGY_LOAD_WEIGHT = _rows.number(
    "MX_P2P_TOPOLOGY_LOAD_WEIGHT",
    0.0,
    "weight of the load in topology_aware; unset: MX_P2P_LOAD_WEIGHT if that is set, else 0",
    "Selection",
    strict=False,
    clamp=True,
)
TOPOLOGY_LEVELS = _rows.text(
    "MX_P2P_TOPOLOGY_LEVELS",
    "region,zone,datacenter,block,rack,host,numa",
    "topology levels, broad to narrow",
    "Selection",
)
TOPOLOGY = _rows.text("MX_P2P_TOPOLOGY", "", "where this node is: a JSON object, level to value", "Selection")
TOPOLOGY_MOUNT_PATH = _rows.text(
    "DYN_TOPOLOGY_MOUNT_PATH",
    "/etc/dynamo/topology",
    "directory with one file a level, when MX_P2P_TOPOLOGY is unset",
    "Selection",
)
MAX_SOURCES = _rows.integer("MX_P2P_MAX_SOURCES", 3, "sources tried before falling back", "Selection", low=1)
FRESH_SECONDS = _rows.number(
    "MX_P2P_FRESH_SECONDS", 90, "a record older than this, by the directory's clock, is not used", "Selection", above=True
)

# Source load ---------------------------------------------------------------------------------------------------------
RUNTIME_METRICS_URL = _rows.text(
    "MX_P2P_RUNTIME_METRICS_URL", "", "the engine's Prometheus page, read for its load at each heartbeat", "Source load"
)
MAX_READERS = _rows.integer(
    "MX_SOURCE_MAX_READERS", 8, "open read leases at which a source counts as full", "Source load", low=1
)

# Transfer ------------------------------------------------------------------------------------------------------------
TRANSFER_TIMEOUT = _rows.number(
    "MX_TRANSFER_TIMEOUT", 300, "seconds one source may take for the whole transfer", "Transfer", above=True
)
STALL_TIMEOUT = _rows.number(
    "MX_TRANSFER_STALL_TIMEOUT", 30, "seconds a transfer may go without one byte of progress", "Transfer", above=True
)
LEASE_SECONDS = _rows.number(
    "MX_LEASE_SECONDS", 60, "seconds a read lease lives without renewal; readers renew at a third", "Transfer", above=True
)
NIXL_BACKEND = _rows.text("MX_NIXL_BACKEND", "UCX", "NIXL backend that moves the bytes", "Transfer", strict=True)

# Load ----------------------------------------------------------------------------------------------------------------
VERIFY_DIGEST = _rows.flag("MX_VERIFY_DIGEST", True, "compare every tensor's digest with the source's", "Load")
LOAD_FALLBACK = _rows.choice(
    "MX_LOAD_FALLBACK", ("storage", "none"), "what follows when no source works: read from storage, or stop", "Load"
)
MODEL_NAME = _rows.text(
    "MX_MODEL_NAME",
    "",
    "name under which weights are shared, when replicas give different paths for the same weights",
    "Load",
    shown_default="(unset: the model as the engine was given it)",
)
MODEL_REVISION = _rows.text(
    "MX_MODEL_REVISION", "", "revision that is part of the identity", "Load", shown_default="(unset: the engine's revision)"
)

# Refit ---------------------------------------------------------------------------------------------------------------
PUBLISH_MODE = _rows.choice(
    "MX_PUBLISH_MODE",
    ("in_place", "snapshot"),
    "a trainer publishes its weights where they lie, or a copy of them that the optimizer does not touch",
    "Refit",
)
PUBLISH_WAIT_SECONDS = _rows.number(
    "MX_PUBLISH_WAIT_SECONDS", 60, "seconds a trainer waits for readers of a version before it overwrites it", "Refit"
)
REFIT_WAIT_SECONDS = _rows.number(
    "MX_REFIT_WAIT_SECONDS", 60, "seconds an engine waits for the version it was asked for to become READY", "Refit", above=True
)
STAGING_BYTES = _rows.integer(
    "MX_STAGING_BYTES",
    1 << 30,
    "most bytes an engine stages at once while it installs full tensors or casts",
    "Refit",
    low=1 << 20,
)
REFIT_SHADOW = _rows.choice(
    "MX_REFIT_SHADOW",
    ("auto", "always", "never"),
    "whether new weights arrive beside the old ones; never: serving pauses meanwhile, and is refused if they do not arrive",
    "Refit",
)

# Floor ---------------------------------------------------------------------------------------------------------------
MIN_GBPS = _rows.floor_bound(
    "MX_RESHARD_MIN_GBPS", "floor of a rank's wire rate, Gbit/s; auto: a fraction of the link", auto=True
)
MAX_GBPS = _rows.floor_bound(
    "MX_RESHARD_MAX_GBPS", "ceiling of a rank's wire rate, Gbit/s; above it nothing is installed", auto=False
)
FLOOR_AUTO_FRACTION = _rows.number(
    "MX_FLOOR_AUTO_FRACTION", 0.3, "fraction of the link rate that is the floor under auto", "Floor", strict=False, above=True
)
FLOOR_LINK_GBPS = _rows.number(
    "MX_FLOOR_LINK_GBPS", 0, "link rate used by auto, Gbit/s; 0: read it from sysfs", "Floor", strict=False
)
FLOOR_MIN_BYTES = _rows.integer(
    "MX_FLOOR_MIN_BYTES", 64 << 20, "transfers below this many bytes are unmeasured", "Floor", strict=False
)
RECORDS_FILE = _rows.text(
    "MX_RECORDS_FILE",
    "",
    "records also go to this file, JSON lines; {pid} and {rank} in the name are filled in, a pid is added otherwise",
    "Floor",
)

# Metrics -------------------------------------------------------------------------------------------------------------
METRICS_PORT = _rows.integer(
    "MX_METRICS_PORT",
    0,
    "port of the Prometheus page of all processes of this host; the same in each of them",
    "Metrics",
    low=1,
    high=65535,
    strict=False,
    shown_default="(unset: off)",
)
METRICS_HOST = _rows.text(
    "MX_METRICS_HOST", "0.0.0.0", "address that the metrics page binds; 127.0.0.1 for this host only", "Metrics"
)

# Patches -------------------------------------------------------------------------------------------------------------
DISABLE_PATCHES = _rows.flag("MX_DISABLE_PATCHES", False, "apply none of the framework patches", "Patches")


def set_default(name: str, value: str) -> bool:
    """Set a foreign variable (UCX_…) unless the operator did; returns whether it was set. Called when a transport opens."""
    if name in os.environ:
        return False
    os.environ[name] = value
    return True


def foreign(name: str) -> str | None:
    """A variable that belongs to another project (UCX_TLS, …), for reports."""
    return os.environ.get(name)


def runtime_dir() -> Path:
    """The host-local directory for small files of this user; made on first use by whoever writes."""
    configured = RUNTIME_DIR.get()
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"mx-{os.getuid()}"


def unknown_names() -> list[str]:
    """Set variables that begin like ours and are not in the table: most often a typing error."""
    return sorted(name for name in os.environ if name.startswith("MX_") and name not in TABLE)
