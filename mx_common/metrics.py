"""Every metric of the pack, in one table, and the page that shows them.

    metrics.LOAD_ATTEMPTS.add(outcome="DigestMismatch")
    metrics.serve(rank=3)               # from now on, on MX_METRICS_PORT, if that is set

The table of `docs/metrics.md` is made from this one. Names have base units. A label has a value out of a fixed set, or is a word that
code chose (an engine); names of models, workers, hosts and files, and versions, are never labels.

Invariant: without MX_METRICS_PORT there is no thread, no socket and no file; and neither counting nor serving ever raises.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from mx_common import envs, errors
from mx_common._metric import Age, Counter, Gauge, Histogram, Label, Table, log
from mx_common._once import warn_once

if TYPE_CHECKING:
    from mx_common._metrics_page import Page

__all__ = ["COMMON_LABELS", "TABLE", "serve"]

TABLE = Table()

COMMON_LABELS = ("process", "rank")
"""Labels of every sample on the page: the number of the process on its host, and the rank that it is, where it is one."""

# Gbit/s in bytes per second
_GBPS = 1e9 / 8
_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_RATES = tuple(gbps * _GBPS for gbps in (0.1, 0.5, 1, 2, 5, 10, 20, 40, 80, 100, 150, 200, 300, 400, 800))

_ERRORS = tuple(name for name in errors.__all__ if name != "MxError")
_PATHS = ("load", "reshard", "staged")
_PATH, _REFIT_PATH = Label("path", _PATHS), Label("path", _PATHS[1:])
_ENGINE, _FRAMEWORK = Label("engine"), Label("framework")

# Transfers: counted where they are judged, in mx_common.floor -------------------------------------------------------
TRANSFERS = TABLE.add(
    Counter(
        "mx_transfers_total",
        "transfers that were judged, one for each record; reason says why one is unmeasured; floor: unknown is auto without a link rate",
        _PATH,
        _ENGINE,
        _FRAMEWORK,
        Label("verdict", ("ok", "slow", "impossible", "unmeasured")),
        Label("reason", ("none", "no_bytes", "no_time", "below_min_bytes", "no_link_rate")),
        Label("floor", ("armed", "off", "unknown")),
    )
)
TRANSFER_BYTES = TABLE.add(
    Counter("mx_transfer_bytes_total", "bytes that transfers read over the wire", _PATH, _ENGINE, _FRAMEWORK)
)
TRANSFER_SECONDS = TABLE.add(Histogram("mx_transfer_seconds", "seconds of the wire phase", _PATH, bounds=_SECONDS))
TRANSFER_RATE = TABLE.add(
    Histogram(
        "mx_transfer_bytes_per_second",
        "rates of the transfers that have one; bounds from 0.1 to 800 Gbit/s",
        _PATH,
        bounds=_RATES,
    )
)
LAST_RATE = TABLE.add(Gauge("mx_transfer_last_bytes_per_second", "rate of the last transfer that has one", _PATH))
FLOOR = TABLE.add(
    Gauge("mx_transfer_floor_bytes_per_second", "floor of the last transfer; 0: off; missing while it is not known", _PATH)
)

# Loads ---------------------------------------------------------------------------------------------------------------
LOAD_SECONDS = TABLE.add(
    Histogram(
        "mx_load_seconds",
        "seconds of whole loads; from a source, from storage as the first replica, as a fallback, or because the model is not shared",
        Label("outcome", ("source", "first", "fallback", "not_shared", "failed")),
        bounds=_SECONDS,
    )
)
LOAD_ATTEMPTS = TABLE.add(
    Counter(
        "mx_load_attempts_total",
        "attempts to read from one source: ok, or the error that ended it; this_node: nothing could be received here",
        Label("outcome", ("ok", "this_node", *_ERRORS)),
    )
)
LOAD_STAGES = TABLE.add(
    Counter(
        "mx_load_stage_seconds_total",
        "seconds of attempts by stage, failed ones included",
        Label("stage", ("plan", "connect", "wire", "verify")),
    )
)
LOAD_CANDIDATES = TABLE.add(
    Counter(
        "mx_load_candidates_total",
        "sources that the directory listed for loads: in the order, or why not",
        Label("outcome", ("ordered", "self", "gone", "rank", "accelerator", "old")),
    )
)
SELECTIONS = TABLE.add(
    Counter(
        "mx_selections_total",
        "orders of sources that were made, by the policy that ran",
        _PATH,
        Label("policy", ("random", "rendezvous_hash", "load_aware", "topology_aware", "balanced")),
    )
)

# Refits --------------------------------------------------------------------------------------------------------------
REFITS = TABLE.add(
    Counter(
        "mx_refits_total",
        "versions that were asked for: installed; failed, the old one serves; broken, the engine serves nothing",
        _REFIT_PATH,
        Label("outcome", ("installed", "failed", "broken")),
    )
)
REFIT_FAILURES = TABLE.add(
    Counter(
        "mx_refit_failures_total",
        "versions that were not installed, by the error that was the reason",
        Label("reason", _ERRORS),
    )
)
REFIT_SECONDS = TABLE.add(
    Histogram("mx_refit_seconds", "seconds of installed versions, all stages", _REFIT_PATH, bounds=_SECONDS)
)
REFIT_STAGES = TABLE.add(
    Counter(
        "mx_refit_stage_seconds_total",
        "seconds of installed versions by stage",
        _REFIT_PATH,
        Label("stage", ("wait", "plan", "wire", "verify", "check", "copy", "land", "install")),
    )
)
SERVING_VERSION = TABLE.add(Gauge("mx_refit_serving_version", "number of the version that was installed last"))
PUBLISHES = TABLE.add(
    Counter(
        "mx_publishes_total",
        "parts of versions that a trainer's rank published, or could not",
        Label("outcome", ("published", "failed")),
    )
)

# Directory -----------------------------------------------------------------------------------------------------------
HEARTBEATS = TABLE.add(
    Counter(
        "mx_heartbeats_total",
        "of a source to its directory: heartbeats that were sent or failed, first registrations and later ones",
        Label("outcome", ("sent", "failed", "registered", "registered_again")),
    )
)
SOURCE_LOAD = TABLE.add(
    Gauge("mx_source_load_ratio", "load that this source published last, 0 to 1; missing without a reading")
)
SOURCE_READS = TABLE.add(Gauge("mx_source_reads_in_flight", "open read leases on this source, at its last heartbeat"))
DIRECTORY_SOURCES = TABLE.add(
    Gauge(
        "mx_directory_sources",
        "sources that the directory of this process knows",
        Label("status", ("UNKNOWN", "INITIALIZING", "READY", "STALE")),
    )
)
DIRECTORY_VERSIONS = TABLE.add(
    Gauge(
        "mx_directory_versions",
        "versions of trained weights that the directory of this process knows",
        Label("state", ("STAGING", "READY", "RELEASING")),
    )
)
DIRECTORY_REQUESTS = TABLE.add(
    Counter(
        "mx_directory_requests_total",
        "calls that the directory of this process answered, by the gRPC method and status",
        Label("method", most=64),
        Label(
            "code",
            (
                *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED"),
                *("FAILED_PRECONDITION", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE"),
            ),
        ),
    )
)

# Events that a process may see once in its life, which no rate shows -------------------------------------------------
EVENT_AGE = TABLE.add(
    Age(
        "mx_event_age_seconds",
        "seconds since it happened last in this process, by its own clock; missing while it never did. weights_broken ends with the next "
        "whole version",
        Label("event", ("storage_fallback", "impossible", "refit_failed", "weights_broken")),
    )
)

_serving = threading.RLock()
_page: Page | None = None
_rank = ""


def serve(rank: int | None = None) -> None:
    """Show this process's numbers on the page of its host, if MX_METRICS_PORT says where that is. `rank`: which one this process is.

    Idempotent, and never raises: what cannot be served is said once."""
    global _page
    try:
        if rank is not None:
            _say_rank(rank)
        port = envs.METRICS_PORT.get()
        if not port or _page is not None:
            return
        with _serving:
            if _page is None:
                from mx_common._metrics_page import Page

                _page = Page(port, envs.METRICS_HOST.get(), TABLE, labels=lambda: {"rank": _rank}, in_child=_forget)
                _page.start()
    except Exception as error:  # see the invariant
        with contextlib.suppress(Exception):
            warn_once(log, ("serve", str(error)), "metrics of this process are not served: %s", error)


def _say_rank(rank: int) -> None:
    """A process that is one rank has its number as a label; one that is several says so."""
    global _rank
    _rank = str(rank) if _rank in ("", str(rank)) else "several"


def _forget() -> None:
    """In a forked child: it has served nothing, and is no rank yet."""
    global _page, _rank, _serving
    _page, _rank, _serving = None, "", threading.RLock()
