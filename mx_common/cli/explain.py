"""`mx explain MODEL`: which source this node would take, and why.

Invariant: uses the functions a load uses, on the records a load would get, and changes nothing.
"""

from __future__ import annotations

import json
import socket
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from mx_common import envs
from mx_common.cli.sources import asking
from mx_common.directory.client import DirectoryClient
from mx_common.load.candidates import candidates_of, eligibility_now
from mx_common.selection import Candidate, Explanation, Target, explain, get_selector
from mx_common.topology import local_topology
from mx_common.wire import p2p

__all__ = ["command"]


def command(
    model: str = typer.Argument(help="The model's name as `mx sources` shows it."),
    rank: int = typer.Option(0, "--rank", help="Rank of the target: sources of other ranks are dropped."),
    selector: str = typer.Option(None, "--selector", help="Policy to ask. [default: MX_P2P_SOURCE_SELECTOR]"),
    worker_id: str = typer.Option(
        None, "--worker-id", help="The target's id, which hashing policies use. [default: this host's name]"
    ),
    accelerator: str = typer.Option("", "--accelerator", help="The target's accelerator (cpu, cuda, ...). [default: any]"),
    server: str = typer.Option(None, "--server", help="host:port of the directory. [default: as replicas would]"),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show every source of MODEL in the order a replica on this node would try it, with the parts of its score, and those it would drop.

    Weights are only taken from a source of equal identity (engine, versions, parallel layout, dtype): each identity is shown by itself.
    Exit 1 when no source could be used.
    """
    target = Target(model, worker_id or socket.gethostname(), rank)
    policy = get_selector(selector or envs.SOURCE_SELECTOR.get())
    with asking(server) as client:
        listing = client.list_sources(model_name=model, status=p2p.SOURCE_STATUS_READY)
        eligibility = eligibility_now(listing, envs.FRESH_SECONDS.get(), accelerator)
        groups: dict[str, list[Candidate]] = {}
        for candidate in candidates_of(listing):
            groups.setdefault(candidate.mx_source_id, []).append(candidate)
        shown = {
            source_id: (_identity_words(client, members[0]), explain(members, target, eligibility=eligibility, selector=policy))
            for source_id, members in sorted(groups.items())
        }
    if as_json:
        groups_json = [
            {"mx_source_id": source_id, "identity": words, "candidates": [_as_json(row) for row in rows]}
            for source_id, (words, rows) in shown.items()
        ]
        typer.echo(json.dumps({"model": model, "policy": policy.name, "groups": groups_json}, indent=2))
    else:
        _print(Console(), model, policy.name, shown)
    if not any(row.place for _, rows in shown.values() for row in rows):
        raise typer.Exit(1)


def _print(console: Console, model: str, policy: str, shown: dict[str, tuple[str, list[Explanation]]]) -> None:
    here = " ".join(f"{level}={value}" for level, value in local_topology().items()) or "unknown"
    console.print(f"policy {policy}, this node: {here}", highlight=False)
    if not shown:
        console.print(f"no READY source of {model}: the next replica reads from storage", style="yellow", markup=False)
    for source_id, (words, rows) in shown.items():
        table = Table(title=f"{source_id}: {words}", title_justify="left")
        for heading in ("place", "worker", "load", "shared depth", "tier", "unit hash", "score", "dropped"):
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(
                str(row.place or "-"),
                row.candidate.worker_id[:12],
                f"{row.load:.2f}" + ("" if row.candidate.source_load is not None else " (unknown)"),
                "" if row.depth is None else str(row.depth),
                "" if row.tier is None else str(row.tier),
                f"{row.unit_hash:.4f}",
                "" if row.score is None else f"{row.score:.4f}",
                row.dropped or "",
                style="green" if row.place == 1 else None,
            )
        console.print(table)
        first = next((row for row in rows if row.place == 1), None)
        console.print(
            f"a target of this identity would read from worker {first.candidate.worker_id}, load {first.load:.2f}"
            if first
            else "no source of this identity can be used: the next replica reads from storage",
            markup=False,
            highlight=False,
        )


def _identity_words(client: DirectoryClient, member: Candidate) -> str:
    found = client.get_metadata(member.mx_source_id, member.worker_id)
    if found is None:
        return "identity unknown"
    identity = found.identity
    framework = p2p.BackendFramework.Name(identity.backend_framework).removeprefix("BACKEND_FRAMEWORK_").lower()
    parallel = f"TP{identity.tensor_parallel_size} PP{identity.pipeline_parallel_size} EP{identity.expert_parallel_size}"
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
