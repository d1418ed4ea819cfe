"""`mx doctor`: can this machine move weights, and if not, what to do.

Invariants: every check ends with a finding of its own, in a bounded time; one that cannot be carried out is a warning, never an
exception. Exit 1 when one fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from mx_common import envs, patching
from mx_common.cli import _checks
from mx_common.cli._ask import server_option
from mx_common.cli._checks import Check
from mx_common.cli._output import cell, line, make_console, make_table, print_json, show
from mx_common.cli._probe import Probe
from mx_common.errors import MxError

__all__ = ["Check", "command", "run_checks"]

SYSFS = Path("/sys/class")
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
INSTALL_NIXL = "pip install 'mx-adapters[nixl]' (nixl-cu12 or nixl-cu13, to match the driver)"


def run_checks(server: str | None = None, *, patience: float = 60.0, sysfs: Path = SYSFS) -> Iterator[Check]:
    """All findings, in the order a person would look. `patience`: seconds the checks that load foreign code may take."""
    with Probe("nixl") as nixl, Probe("patches") as patches:
        checks: list[tuple[str, Callable[[], Iterator[Check]]]] = [
            ("versions", _checks.versions),
            ("engines", _checks.engines),
            ("settings", _checks.settings),
            ("NIXL", lambda: _nixl(*nixl.wait(patience))),
            ("NICs", lambda: _checks.nics(sysfs)),
            ("placement", _checks.placement),
            ("directory", lambda: _checks.directory(server)),
            ("host-local files", _checks.runtime_files),
            ("metrics", _checks.metrics_page),
            ("patches", lambda: _patches(*patches.wait(patience))),
            ("processes", _processes),
        ]
        for name, check in checks:
            try:
                yield from check()
            except (MxError, OSError, ValueError) as error:
                yield Check(name, "warn", f"could not be checked: {error}", "correct what it names, and ask again")


def command(
    server: str = typer.Option(
        None, "--server", callback=server_option, help="host:port of the directory to reach. [default: as replicas would]"
    ),
    patience: float = typer.Option(60.0, "--patience", min=0.1, help="Seconds that NIXL and the patches may take to answer."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Check what moving weights needs on this machine, and say what to do about what is wrong.

    \b
    Examples:
      mx doctor
      mx doctor --server 10.0.0.5:8001
      mx doctor --json

    \b
    versions     installed packages, and those outside the range this pack was run with
    vLLM, ...    of each engine this pack has an adapter for: what is installed, and whether it is supported
    settings     variables that are not valid, MX_ names that do not exist
    NIXL         the configured backend, a read of 1 MiB between two agents, plugins that load
    NICs         RDMA ports, their state, the locked memory they need
    directory    does it answer, what does it know, do the clocks agree
    metrics      whether they are on, and who answers on their port
    patches      what would be applied to the engine here, what running processes applied

    Exit 1 when something fails; warnings leave it at 0.
    """
    found = list(run_checks(server, patience=patience))
    failed = [check for check in found if check.state == "fail"]
    if as_json:
        print_json({"healthy": not failed, "checks": [asdict(check) for check in found]})
    else:
        _print(make_console(), found, len(failed))
    if failed:
        raise typer.Exit(1)


def _print(console: Console, found: list[Check], failed: int) -> None:
    table = make_table(console, "check", "state", "finding", whole=("state",))
    for check in found:
        table.add_row(cell(check.name), cell(check.state, COLOURS[check.state]), cell(check.detail))
        if check.fix:
            table.add_row("", cell("fix", "bold"), cell(check.fix, "bold"))
    show(console, table)
    warned = sum(check.state == "warn" for check in found)
    verdict = f"{failed} failed, {warned} warned: see the lines marked fix" if failed or warned else "nothing is wrong"
    line(console, verdict, "red" if failed else "yellow" if warned else "green")


def _nixl(findings: list[dict[str, Any]], trouble: str) -> Iterator[Check]:
    facts = {key: value for finding in findings for key, value in finding.items()}
    wish = envs.foreign("UCX_TLS") or "not set: UCX chooses"
    if "transport_error" in facts:
        yield Check("NIXL", "fail", facts["transport_error"], f"{INSTALL_NIXL}; or set {envs.NIXL_BACKEND.name}")
    if "backend" in facts:
        yield Check("NIXL", "ok", f"backend {facts['backend']} starts; UCX_TLS {wish}")
    if "moved_over" in facts:
        yield Check("transport", "ok", f"1 MiB read between two agents over {facts['moved_over']}")
    plugins = [finding for finding in findings if "plugin" in finding]
    usable = [f"{p['plugin']} ({', '.join(p['kinds'])})" for p in plugins if "kinds" in p]
    unusable = [f"{p['plugin']} ({p['error']})" for p in plugins if "error" in p]
    if usable:
        yield Check("NIXL plugins", "ok", f"usable: {', '.join(usable)}")
    if unusable:
        yield Check("NIXL plugins", "ok", f"not usable here: {', '.join(unusable)}")
    if not trouble:
        return
    if "moved_over" in facts:  # what loads need works; a plugin nobody asked for does not
        yield Check("NIXL plugins", "warn", trouble, "uninstall the plugin, or ignore it: it is not the configured backend")
    elif "No module named" in trouble or "ImportError" in trouble:
        yield Check("NIXL", "fail", trouble, INSTALL_NIXL)
    else:
        fix = f"UCX_LOG_LEVEL=info mx doctor --patience 120; another {envs.NIXL_BACKEND.name} or UCX_TLS=tcp may avoid it"
        yield Check("NIXL", "fail", trouble, fix)


def _patches(findings: list[dict[str, Any]], trouble: str) -> Iterator[Check]:
    for finding in findings:
        state, why = finding["state"], finding["why"]
        detail = f"{finding['for']}: {'would be applied' if state == 'applied' else state} ({why})"
        if state == "disabled":
            yield Check(
                f"patch {finding['patch']}", "warn", detail, f"unset {envs.DISABLE_PATCHES.name} to share weights again"
            )
        else:
            yield Check(f"patch {finding['patch']}", "ok", detail)
    if trouble:
        yield Check("patches", "warn", trouble, "import the engine by hand (python -c 'import vllm') to see why")


def _processes() -> Iterator[Check]:
    found: dict[int, list[str]] = {}
    for pid, outcome in patching.applied_on_this_host():
        why = f" ({outcome.why})" if outcome.state == "skipped" else ""
        found.setdefault(pid, []).append(f"{outcome.name} {outcome.state}{why}")
    for pid, outcomes in found.items():
        yield Check(f"process {pid}", "ok", f"patches: {', '.join(outcomes)}")
    if not found:
        yield Check("processes", "ok", "no process of this user on this host has applied a patch")
