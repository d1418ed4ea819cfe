"""The checks of `mx doctor` on this machine, its settings and its directory; each yields findings.

    for check in directory("10.0.0.5:8001"):
        print(check.state, check.detail, check.fix)

Invariants: a finding that is not `ok` says what to do. A reading that is only telemetry, and is not there, is no fault.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import platform
import resource
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import InvalidVersion

from mx_common import envs, selection
from mx_common.cli._ask import PATIENCE_SECONDS, directory_address, is_embedded
from mx_common.cli.envs import meant, problem_of
from mx_common.cli.sources import fetch
from mx_common.directory.address import Address
from mx_common.directory.client import DirectoryClient
from mx_common.engines import Engine, adapters
from mx_common.errors import ConfigError, DirectoryError
from mx_common.topology import local_topology

__all__ = [
    "Check",
    "State",
    "directory",
    "engines",
    "metrics_page",
    "nics",
    "placement",
    "runtime_files",
    "settings",
    "versions",
]

State = Literal["ok", "warn", "fail"]

DISTRIBUTION = "mx-adapters"
EXTRAS = ("nixl", "redis")
SHOWN_PACKAGES = ("torch",)
# the same module is also distributed under these names
ALIASES = {"nixl-cu12": ("nixl-cu13",)}
SKEW_SECONDS = 5.0


@dataclass(frozen=True)
class Check:
    """One finding; `fix` says what to do."""

    name: str
    state: State
    detail: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.state != "ok" and not self.fix:
            raise ConfigError(f"check {self.name!r} found {self.detail!r} and says nothing to do about it: give a fix")


def versions() -> Iterator[Check]:
    """What is installed, held against the ranges this pack's own metadata states: those it was run with."""
    shown, wrong = [f"Python {platform.python_version()}"], []
    try:
        wanted = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
        shown.append(f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}")
    except metadata.PackageNotFoundError:
        yield Check("versions", "warn", f"{DISTRIBUTION} is not installed, only on the path", "pip install mx-adapters")
        return
    for requirement in wanted:
        extra = next((e for e in EXTRAS if requirement.marker and requirement.marker.evaluate({"extra": e})), "")
        if requirement.marker and not extra and not requirement.marker.evaluate({"extra": ""}):
            continue  # an engine, which has a check of its own, or a tool that develops this pack
        name, found = _installed(requirement.name)
        if found:
            shown.append(f"{name} {found}")
        if found and not _within(requirement, found):
            fix = f"pip install '{requirement.name}{requirement.specifier}'"
            wrong.append(Check(name, "fail", f"{name} {found} is outside the supported range {requirement.specifier}", fix))
        elif not found and not extra:
            wrong.append(
                Check(requirement.name, "fail", "is not installed", f"pip install '{requirement.name}{requirement.specifier}'")
            )
    for name in SHOWN_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            shown.append(f"{name} {metadata.version(name)}")
    yield Check("versions", "ok", ", ".join(shown))
    yield from wrong


def engines() -> Iterator[Check]:
    """Of every adapter: the engine that is installed, and whether the adapter was run with that version."""
    for name, engine in adapters():
        if not isinstance(engine, Engine):
            yield Check(
                f"engine {name}",
                "warn",
                f"its adapter does not load: {engine}",
                f"pip install --force-reinstall {DISTRIBUTION}",
            )
            continue
        version = engine.installed()
        if not version:
            yield Check(engine.name, "ok", f"not installed; supported: {engine.supported}")
        elif engine.supports(version):
            yield Check(engine.name, "ok", f"{version} is within the supported range {engine.supported}")
        else:
            fix = (
                f"pip install '{engine.distributions[0]}{engine.supported}'; until then the pack is refused: {engine.otherwise}"
            )
            yield Check(engine.name, "fail", f"{version} is outside the supported range {engine.supported}", fix)


def settings() -> Iterator[Check]:
    """Values that cannot be used, and names that are close to ours."""
    problems = [var for var in envs.TABLE.values() if var.read().problem]
    for var in problems:
        state: State = "fail" if var.strict else "warn"
        yield Check("settings", state, problem_of(var), f"unset {var.name}, or give it an allowed value")
    for name in envs.unknown_names():
        close = meant(name)
        fix = f"did you mean {close}?" if close else "unset it if it was meant for this pack; `mx envs` lists the names"
        yield Check("settings", "warn", f"{name} is set and is not a variable of this pack", fix)
    sent, taken = (envs.foreign(f"UCX_TCP_{way}_SEG_SIZE") for way in ("TX", "RX"))
    if sent and sent != taken:
        fix = "unset it, or set UCX_TCP_RX_SEG_SIZE to at least as much in every process that may read from this one"
        yield Check("settings", "warn", f"UCX_TCP_TX_SEG_SIZE={sent} corrupts tcp readers that take smaller pieces", fix)
    if not problems:
        given = [name for name, var in envs.TABLE.items() if var.is_set()]
        yield Check("settings", "ok", f"valid; set: {', '.join(given) or 'none'}")


def placement() -> Iterator[Check]:
    """The policy that would run here, and where this node says it is."""
    with _warnings_of("mx_common") as warnings:
        policy = selection.configured_policy_label()
        place = local_topology()
    shown = " ".join(f"{level}={value}" for level, value in place.items())
    yield Check("policy", "ok", policy)
    yield Check("topology", "ok", shown or "none; MX_P2P_TOPOLOGY tells topology_aware and balanced where this node is")
    for warning in warnings:
        yield Check("selection", "warn", warning, "correct the value; `mx envs --meaning` says what is expected")


def nics(sysfs: Path) -> Iterator[Check]:
    """RDMA ports with state and rate, else the other network devices; and whether an RDMA device may pin memory."""
    ports = sorted(sysfs.glob("infiniband/*/ports/*"))
    if not ports:
        plain = [_device(path) for path in sorted(sysfs.glob("net/*")) if path.name != "lo"]
        yield Check(
            "NICs", "ok", f"no RDMA device: TCP between nodes, shared memory inside one ({', '.join(plain) or 'no device'})"
        )
        return
    for port in ports:
        state, rate = _text(port / "state"), _text(port / "rate")
        name = f"{port.parts[-3]}:{port.name}"
        if "ACTIVE" in state.upper():
            yield Check("NICs", "ok", f"{name} {rate}")
        else:
            yield Check("NICs", "warn", f"{name} is {state or 'in an unknown state'}", "check its cable and its switch port")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        fix = "ulimit -l unlimited (in containers: the memlock ulimit): an RDMA device pins what it reads"
        yield Check("locked memory", "warn", f"at most {soft >> 20} MiB may be locked", fix)


def directory(server: str | None) -> Iterator[Check]:
    """Does the directory answer, what does it know, and do the clocks agree."""
    address = directory_address(server)
    patience = min(PATIENCE_SECONDS, envs.RPC_TIMEOUT.get())
    try:
        with DirectoryClient(address, timeout=patience) as client:
            asked = time.time()
            listing = client.list_sources()
            answered = time.time()
            statuses = [row.status for row in fetch(client)]
    except DirectoryError as error:
        yield _absent(address, server, error)
        return
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in sorted(set(statuses))) or "no source"
    yield Check("directory", "ok", f"{address} answers in {(answered - asked) * 1000:.0f} ms: {counts}")
    if listing.server_time_ms is None:
        yield Check("clocks", "ok", "the directory does not tell its time; ages are taken between its own records")
        return
    skew = (asked + answered) / 2 - listing.server_time_ms / 1000
    detail = f"this machine is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the directory"
    if abs(skew) < SKEW_SECONDS:
        yield Check("clocks", "ok", detail)
    else:
        fix = "run an NTP client on both; loads go by the directory's clock alone, but log lines of two machines do not line up"
        yield Check("clocks", "warn", detail, fix)


def runtime_files() -> Iterator[Check]:
    """The small files through which processes of one host know of each other."""
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


def metrics_page() -> Iterator[Check]:
    """Where the metrics of this host are served, and whether they are."""
    port, host = envs.METRICS_PORT.read().value, envs.METRICS_HOST.read().value
    if not port:
        yield Check("metrics", "ok", f"off; {envs.METRICS_PORT.name} turns them on")
        return
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    page = http.client.HTTPConnection(near, port, timeout=PATIENCE_SECONDS)
    ours = False
    try:
        with contextlib.closing(page):
            page.request("GET", "/metrics")
            ours = b"# HELP mx_" in page.getresponse().read()
    except ConnectionRefusedError:
        yield Check(
            "metrics",
            "ok",
            f"nobody serves {near}:{port} yet; the first process that moves weights or hosts the directory will",
        )
        return
    except (OSError, http.client.HTTPException):
        pass  # whoever listens there is none of us
    if ours:
        yield Check("metrics", "ok", f"http://{near}:{port}/metrics answers for the processes of this host")
    else:
        fix = f"set {envs.METRICS_PORT.name} to a free port in every process of this host"
        yield Check("metrics", "warn", f"{near}:{port} does not answer as our metrics page: another program has it", fix)


def _absent(address: str, server: str | None, error: DirectoryError) -> Check:
    if not is_embedded(server):
        where = "--server" if server else envs.SERVER_ADDRESS.name
        return Check("directory", "fail", str(error), f"start `mx server` on {address}, or correct {where}")
    parsed = Address.parse(address)
    with contextlib.suppress(OSError), socket.create_connection((parsed.host, parsed.port), timeout=1):
        fix = f"set {envs.EMBEDDED_ADDRESS.name} to a free loopback port for every process of this machine, or {envs.SERVER_ADDRESS.name}"
        return Check("directory", "fail", f"another program has {address}: {error}", fix)
    return Check("directory", "ok", f"nobody hosts the embedded one on {address} yet; the first replica will")


def _installed(name: str) -> tuple[str, str]:
    """(distribution, version) of the first of a package's names that is installed; the version "" when none is."""
    for candidate in (name, *ALIASES.get(name, ())):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return candidate, metadata.version(candidate)
    return name, ""


def _within(requirement: Requirement, version: str) -> bool:
    try:
        return requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _device(path: Path) -> str:
    speed = _text(path / "speed")
    state = _text(path / "operstate")
    return " ".join(
        part for part in (path.name, f"{speed} Mbit/s" if speed.isdigit() else "", "" if state != "down" else "down") if part
    )


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", errors="replace").strip()
    except OSError:
        return ""


@contextlib.contextmanager
def _warnings_of(name: str) -> Iterator[list[str]]:
    """Collect what a logger says in the block, instead of printing it."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
