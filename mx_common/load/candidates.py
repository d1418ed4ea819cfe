"""Which sources a target may read from, in which order, and why not the others.

    funnel = find_sources(client, job)
    log.info(funnel.line())             # the one line that explains a load: candidates, policy, order, dropped with reasons
    for candidate in funnel.order: ...

Invariant: `funnel_of` is a function of values. Ages are taken by the directory's clock, never by this node's, so a node whose clock
is an hour off sees the same sources.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mx_common import metrics
from mx_common.directory.client import DirectoryClient, Listing
from mx_common.load import lives
from mx_common.load.engine import Job
from mx_common.selection import Candidate, DropReason, Eligibility, Selector, Target, funnel, get_selector
from mx_common.wire import p2p

__all__ = ["Funnel", "candidates_of", "eligibility_now", "find_sources", "funnel_of"]

_SHOWN = 8


@dataclass(frozen=True)
class Funnel:
    """`order`: usable candidates, best first; `dropped`: the others, each with its reason. `others`: where nothing is listed, the models
    of which there are sources."""

    model: str
    policy: str
    order: tuple[Candidate, ...]
    dropped: tuple[tuple[Candidate, DropReason], ...] = ()
    others: tuple[str, ...] = ()

    def line(self) -> str:
        """Everything that decided the order, on one line; long lists are cut and counted."""
        parts = [f"sources of {self.model}: {len(self.order) + len(self.dropped)} listed", f"policy {self.policy}"]
        names = [f"{c.worker_id}{_load(c)}" for c in self.order]
        parts.append(f"order [{_cut(names)}]")
        parts.append(f"dropped [{self._dropped()}]")
        return ", ".join(parts)

    def why_none(self) -> str:
        """Why there is nothing to try, in words for a list of reasons."""
        if self.dropped:
            return f"every source is dropped ({self._dropped()})"
        none = "no source of this identity is listed"
        if self.model in self.others:
            return f"{none}, but some of {self.model} in another one (`mx explain {self.model}` shows it)"
        if self.others:
            return f"{none}, but some of {_cut(list(self.others))} (MX_MODEL_NAME makes two paths one model)"
        return none

    def _dropped(self) -> str:
        return _cut([f"{c.worker_id}: {why}" for c, why in self.dropped])


def find_sources(client: DirectoryClient, job: Job) -> Funnel:
    """Ask the directory and order what it lists. Raises DirectoryError when it cannot be asked."""
    listing = client.list_sources(identity=job.identity, status=p2p.SOURCE_STATUS_READY)
    candidates = candidates_of(listing)
    eligibility = eligibility_now(listing, job.settings.fresh_seconds, job.accelerator)
    target = Target(job.identity.model_name, job.worker_id, job.rank)
    found = funnel_of(candidates, target, eligibility, get_selector(job.settings.selector))
    _count(found)
    if not candidates:
        others = client.list_sources(status=p2p.SOURCE_STATUS_READY).instances
        found = replace(found, others=tuple(sorted({ref.model_name for ref in others})))
    return found


def candidates_of(listing: Listing) -> list[Candidate]:
    """What the directory listed, as selection takes it."""
    return [
        Candidate(
            mx_source_id=ref.mx_source_id,
            worker_id=ref.worker_id,
            worker_rank=ref.worker_rank,
            model_name=ref.model_name,
            accelerator=ref.accelerator,
            topology=dict(ref.topology),
            source_load=ref.source_load if ref.HasField("source_load") else None,
            updated_at=ref.updated_at,
        )
        for ref in listing.instances
    ]


def eligibility_now(listing: Listing, fresh_seconds: float, accelerator: str) -> Eligibility:
    """What a source must satisfy for this node now. A directory that does not tell its time is as late as its newest record."""
    now = listing.server_time_ms or max((ref.updated_at for ref in listing.instances), default=0)
    return Eligibility(accelerator, max(0, now - int(fresh_seconds * 1000)), lives.gone())


def funnel_of(candidates: Iterable[Candidate], target: Target, eligibility: Eligibility, selector: Selector) -> Funnel:
    """Drop, then order."""
    kept, dropped = funnel(candidates, target, eligibility)
    return Funnel(target.model_name, selector.name, tuple(selector.order(kept, target)), tuple(dropped))


def _count(found: Funnel) -> None:
    metrics.SELECTIONS.add(path="load", policy=found.policy)
    metrics.LOAD_CANDIDATES.add(len(found.order), outcome="ordered")
    for _, why in found.dropped:
        metrics.LOAD_CANDIDATES.add(outcome=why.kind)


def _load(candidate: Candidate) -> str:
    return "" if candidate.source_load is None else f" (load {candidate.source_load:.2f})"


def _cut(items: list[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return "; ".join(items[:_SHOWN]) + more
