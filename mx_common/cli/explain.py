"""`mx explain MODEL`: which source this node would take, and why.

Invariant: uses the functions a load uses, on the records a load would get, and changes nothing.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console

from mx_common import envs
from mx_common.cli._ask import asking, server_option
from mx_common.cli._output import cell, line, make_console, make_table, print_json, show
from mx_common.cli._policy import policy_option
from mx_common.cli.sources import SourceRow, fetch
from mx_common.directory.client import DirectoryClient
from mx_common.load.candidates import candidates_of, eligibility_now
from mx_common.selection import Candidate, Explanation, Selector, Target, explain, get_selector
from mx_common.topology import local_topology
from mx_common.wire import p2p

__all__ = ["command"]

_SHORT_ID = 12
_READY = "READY"
_SHOWN_MODELS = 5


def command(
    model: str = typer.Argument(help="The model's name as `mx sources` shows it."),
    rank: int = typer.Option(0, "--rank", min=0, help="Rank of the target: sources of other ranks are dropped."),
    selector: str = typer.Option(
        None, "--selector", callback=policy_option, help="Policy to ask. [default: MX_P2P_SOURCE_SELECTOR]"
    ),
    worker_id: str = typer.Option(
        None, "--worker-id", help="The target's id, which hashing policies use. [default: this host's name]"
    ),
    accelerator: str = typer.Option("", "--accelerator", help="The target's accelerator (cpu, cuda, ...). [default: any]"),
    server: str = typer.Option(
        None, "--server", callback=server_option, help="host:port of the directory. [default: as replicas would]"
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show every source of MODEL in the order a replica on this node would try it, with the parts of its score, and those it would not
    use, with the reason.

    \b
    Examples:
      mx explain org/model
      mx explain org/model --selector balanced --rank 1
      MX_P2P_TOPOLOGY='{"rack": "r2"}' mx explain org/model --json

    Weights are only taken from a source of equal identity (engine, versions, parallel layout, dtype): each identity is shown by itself.
    A replica draws a worker id of its own when it starts, so hashing policies may order the same sources otherwise for it; give its id
    with --worker-id to see its order.

    Exit 1 when no source could be used.
    """
    target = Target(model, worker_id or socket.gethostname(), rank)
    policy = get_selector(selector or envs.SOURCE_SELECTOR.get())
    with asking(server) as client:
        groups = _groups(client, target, policy, accelerator)
        others = [] if groups else sorted({row.model for row in fetch(client)})
    if as_json:
        print_json({"model": model, "policy": policy.name, "groups": [group.document() for group in groups]})
    else:
        _print(make_console(), target, policy, groups, others)
    if not any(row.place for group in groups for row in group.rows):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Group:
    """The sources of one identity: `rows` are what a load would be told, `unready` those it would not even be told of."""

    mx_source_id: str
    identity: str
    rows: list[Explanation]
    unready: list[SourceRow]

    def document(self) -> dict[str, Any]:
        """For `--json`; the order of `candidates` is the order in which they would be tried."""
        unready = [{"worker_id": row.worker_id, "place": None, "dropped": _unready(row)} for row in self.unready]
        candidates = [_as_json(row) for row in self.rows] + unready
        return {"mx_source_id": self.mx_source_id, "identity": self.identity, "candidates": candidates}


def _groups(client: DirectoryClient, target: Target, policy: Selector, accelerator: str) -> list[_Group]:
    listing = client.list_sources(model_name=target.model_name, status=p2p.SOURCE_STATUS_READY)
    eligibility = eligibility_now(listing, envs.FRESH_SECONDS.get(), accelerator)
    members: dict[str, list[Candidate]] = {}
    for candidate in candidates_of(listing):
        members.setdefault(candidate.mx_source_id, []).append(candidate)
    unready: dict[str, list[SourceRow]] = {}
    for row in fetch(client, target.model_name):
        if row.status != _READY:
            unready.setdefault(row.mx_source_id, []).append(row)
    groups = []
    for source_id in sorted({*members, *unready}):
        candidates, waiting = members.get(source_id, []), unready.get(source_id, [])
        workers = [c.worker_id for c in candidates] + [row.worker_id for row in waiting]
        rows = explain(candidates, target, eligibility=eligibility, selector=policy)
        groups.append(_Group(source_id, _identity_words(client, source_id, workers[0]), rows, waiting))
    return groups


def _print(console: Console, target: Target, policy: Selector, groups: list[_Group], others: list[str]) -> None:
    here = " ".join(f"{level}={value}" for level, value in local_topology().items()) or "unknown"
    line(console, f"policy {policy.name}, rank {target.worker_rank}, this node's topology: {here}")
    if not groups:
        line(console, f"the directory has no source of {target.model_name}: the next replica {_otherwise()}", "yellow")
        if others:
            more = f" and {len(others) - _SHOWN_MODELS} more" if len(others) > _SHOWN_MODELS else ""
            line(console, f"it has sources of: {', '.join(others[:_SHOWN_MODELS])}{more}")
    for group in groups:
        line(console, "")
        line(console, f"{group.mx_source_id}: {group.identity}")
        _print_table(console, group)
        first = next((row for row in group.rows if row.place == 1), None)
        if first is None:
            line(console, f"no source of this identity can be used: the next replica of it {_otherwise()}", "yellow")
            continue
        usable = sum(1 for row in group.rows if row.place)
        if policy.name == "random" and usable > 1:
            line(console, f"a replica of this identity would read from any of these {usable}, with equal chance")
            continue
        line(console, f"a replica of this identity would read from worker {first.candidate.worker_id}, load {first.load:.2f}")


def _otherwise() -> str:
    """What a replica does when it has no source."""
    none = envs.LOAD_FALLBACK.read().value == "none"
    return "stops, since MX_LOAD_FALLBACK=none" if none else "reads from storage"


def _print_table(console: Console, group: _Group) -> None:
    parts = [name for name in ("depth", "tier", "score") if any(getattr(row, name) is not None for row in group.rows)]
    headings = ("place", "worker", "load", "hash", *parts, "not used because")
    table = make_table(console, *headings, whole=headings[:-1])
    for row in group.rows:
        shares = [getattr(row, name) for name in parts]
        known = row.candidate.source_load is not None
        cells = [
            row.place or "-",
            row.candidate.worker_id[:_SHORT_ID],
            f"{row.load:.2f}" if known else f"{row.load:.2f} unknown",
            f"{row.unit_hash:.4f}",
            *(f"{share:.4f}" if isinstance(share, float) else share for share in shares),
            row.dropped,
        ]
        table.add_row(*(cell(value, "green" if row.place == 1 else "") for value in cells))
    for source in group.unready:
        table.add_row(*map(cell, ("-", source.worker_id[:_SHORT_ID], *[None] * (2 + len(parts)), _unready(source))))
    show(console, table)


def _unready(row: SourceRow) -> str:
    return f"status {row.status}, wanted READY"


def _identity_words(client: DirectoryClient, source_id: str, worker_id: str) -> str:
    found = client.get_metadata(source_id, worker_id)
    if found is None:
        return "identity unknown: the worker left while it was asked for"
    identity = found.identity
    framework = p2p.BackendFramework.Name(identity.backend_framework).removeprefix("BACKEND_FRAMEWORK_").lower()
    sizes = {
        "TP": identity.tensor_parallel_size,
        "PP": identity.pipeline_parallel_size,
        "EP": identity.expert_parallel_size,
    }
    parallel = " ".join(f"{name}{size}" for name, size in sizes.items() if size)
    words = [f"{framework} {identity.backend_framework_version}".strip(), parallel, identity.dtype, identity.quantization]
    return ", ".join(word for word in words if word)


def _as_json(row: Explanation) -> dict[str, Any]:
    return {
        "worker_id": row.candidate.worker_id,
        "place": row.place,
        "dropped": row.dropped,
        "source_load": row.candidate.source_load,
        "load": row.load,
        "depth": row.depth,
        "tier": row.tier,
        "unit_hash": row.unit_hash,
        "score": row.score,
    }
