"""One metrics page for all processes of a host, under one port.

    Page(9400, "0.0.0.0", table, labels=dict, in_child=forget).start()

Each process takes the lowest free number and holds its lock file for as long as it lives; the number is the label `process` of its
samples, so two processes never give one series, there are never more values than processes at once, and a counter that starts again at 0
looks to Prometheus like the reset that it is (a sum over processes would drop when one ends, and be taken for new events). Under its
number it shows its samples on a unix socket. One process holds the lock of the page, binds the port, and merges in what the others show;
the others wait for that lock, so that the next one takes over when it ends, however it ends.

Invariant: a process that is asked and does not answer in time, or is dead, costs its own samples and nothing else. The one that serves
costs the page while it is stopped, as it keeps the port and the lock. A forked child holds nothing of its parent's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from mx_common import envs
from mx_common._host_files import private_folder
from mx_common._metric import Table, log
from mx_common._once import warn_once
from mx_common.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

__all__ = ["Page"]

MOST_PROCESSES = 256
ASK_SECONDS = 1.0
_AT_ONCE = 16
_CLIENT_SECONDS = 10.0
# the port of a process that was killed may be free a moment after its locks
_QUICK_RETRIES, _QUICK_SECONDS, _SLOW_SECONDS = 20, 0.1, 30.0


class Page:
    """This process's part of the page on `host`:`port`. `labels`: what else than its number tells it apart; one without a value is left
    out. `in_child`: called in a forked child, which has to start a page of its own.

    `start` raises ConfigError when the folder for the sockets cannot be used, and for too many processes."""

    def __init__(
        self, port: int, host: str, table: Table, *, labels: Callable[[], Mapping[str, str]], in_child: Callable[[], None]
    ) -> None:
        self.port, self.host = port, host
        self._table, self._labels, self._in_child = table, labels, in_child
        self._files: list[int] = []
        self._sockets: list[socket.socket] = []
        self._folder = Path()
        self._number = 0

    def start(self) -> None:
        """Take a number, show the samples, and wait for the page; returns at once."""
        os.register_at_fork(after_in_child=self._leave_to_parent)
        try:
            listener = self._listen()
        except OSError as error:
            raise ConfigError(
                f"the folder metrics-{self.port} in {envs.runtime_dir()} cannot be used ({error}); set MX_RUNTIME_DIR to a directory "
                "of yours, the same in every process of this host"
            ) from error
        threading.Thread(target=self._show, args=(listener,), name="mx-metrics", daemon=True).start()
        threading.Thread(target=self._run, name="mx-metrics-page", daemon=True).start()

    def _listen(self) -> socket.socket:
        """The socket of this process, under a number that is its own. Raises ConfigError, OSError."""
        self._folder = private_folder(f"metrics-{self.port}", make=True)
        self._number = self._take_number()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets.append(listener)
        path = self._socket_of(self._number)
        path.unlink(missing_ok=True)  # of a process that had this number, and is dead: the number is ours
        with _reachable(path) as short:
            listener.bind(short)
        path.chmod(0o600)
        listener.listen(_AT_ONCE)
        return listener

    def collect(self) -> Iterator[Family]:
        """The samples of every process that answers, family by family. What prometheus_client calls for each scrape."""
        merged: dict[str, Family] = {}
        others = [path for path in sorted(self._folder.glob("*.sock")) if path != self._socket_of(self._number)]
        families = list(self._own())
        if others:
            with ThreadPoolExecutor(min(_AT_ONCE, len(others)), thread_name_prefix="mx-metrics-ask") as pool:
                for found in pool.map(self._ask, others):
                    families += found
        for family in families:
            into = merged.setdefault(family.name, family)
            if into is not family and into.type == family.type:
                into.samples.extend(family.samples)
        yield from merged.values()

    def describe(self) -> list[Family]:
        """The names on the page, for scrapes of some of them."""
        return [metric.family({}, {}) for metric in self._table.metrics.values()]

    def _own(self) -> list[Family]:
        return self._table.families({"process": str(self._number), **self._labels()})

    def _take_number(self) -> int:
        for number in range(MOST_PROCESSES):
            lock = self._open(self._lock_of(number))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._files.remove(lock)
                os.close(lock)
                continue
            return number
        raise ConfigError(
            f"{MOST_PROCESSES} processes share the metrics page of port {self.port}; set MX_METRICS_PORT in fewer"
        )

    def _show(self, listener: socket.socket) -> None:
        """Answer whoever asks on the socket; sleeps until then."""
        from prometheus_client.exposition import generate_latest

        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(ASK_SECONDS)
                connection.sendall(generate_latest(_Once(self._own)))
                # a child that was forked just now may hold it open
                connection.shutdown(socket.SHUT_RDWR)

    def _ask(self, path: Path) -> list[Family]:
        """What the process behind a socket shows; nothing when it does not answer in time."""
        from prometheus_client.parser import text_string_to_metric_families

        deadline, parts = time.monotonic() + ASK_SECONDS, []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking, _reachable(path) as short:
                asking.settimeout(ASK_SECONDS)
                asking.connect(short)
                while part := asking.recv(1 << 16):
                    parts.append(part)
                    asking.settimeout(max(0.001, deadline - time.monotonic()))
            return list(text_string_to_metric_families(b"".join(parts).decode()))
        except ConnectionRefusedError:
            self._tidy(path)
        except (OSError, ValueError) as error:  # ended just now, stopped, or of another release
            log.debug("no metrics from %s: %s", path, error)
        return []

    def _tidy(self, path: Path) -> None:
        """Remove the socket of a dead process, unless another one is taking its number just now."""
        with contextlib.suppress(OSError):
            lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(lock)

    def _run(self) -> None:
        """Wait until nobody has the page, then serve it until the end."""
        from prometheus_client import CollectorRegistry, MetricsHandler

        try:
            fcntl.flock(self._open(self._folder / "page.lock"), fcntl.LOCK_EX)
            registry = CollectorRegistry()
            registry.register(self)
            handler = type("Handler", (MetricsHandler.factory(registry),), {"timeout": _CLIENT_SECONDS})
            server = self._bound(handler)
            log.info("metrics of this host's processes are on http://%s:%d/metrics", self.host, self.port)
            server.serve_forever(poll_interval=3600)  # nobody ends it: no need to wake up
        except Exception as error:
            warn_once(log, ("metrics page", str(error)), "the metrics page ends: %r", error)

    def _bound(self, handler: type) -> _Server:
        tries = 0
        while True:
            try:
                server = _Server.on(self.host, self.port, handler)
                self._sockets.append(server.socket)
                return server
            except (OSError, UnicodeError) as error:  # a name that no host can have is the latter
                tries += 1
                if tries == _QUICK_RETRIES:
                    warn_once(
                        log,
                        ("metrics port", self.host, self.port),
                        "metrics are not served for now: %s:%d cannot be bound (%s); set MX_METRICS_PORT to a free port in every "
                        "process of this host, and one MX_RUNTIME_DIR, through which they share the page; set MX_METRICS_HOST, "
                        "where it is given, to an address of this host",
                        self.host,
                        self.port,
                        error,
                    )
                time.sleep(_QUICK_SECONDS if tries < _QUICK_RETRIES else _SLOW_SECONDS)

    def _leave_to_parent(self) -> None:
        """In a forked child: give up the parent's sockets and locks, which would outlive the parent otherwise."""
        files, self._files = self._files, []
        sockets, self._sockets = self._sockets, []
        if not files and not sockets:
            return  # of a parent's parent
        for file in files:
            with contextlib.suppress(OSError):
                os.close(file)
        for one in sockets:
            with contextlib.suppress(OSError):
                one.close()
        self._in_child()

    def _open(self, path: Path) -> int:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._files.append(file)
        return file

    def _lock_of(self, number: int) -> Path:
        return self._folder / f"{number}.lock"

    def _socket_of(self, number: int) -> Path:
        return self._folder / f"{number}.sock"


class _Once:
    """Families as `generate_latest` takes them."""

    def __init__(self, families: Callable[[], list[Family]]) -> None:
        self.collect = families


class _Server(socketserver.ThreadingTCPServer):
    """HTTPServer asks the resolver for this host's name when it binds, which may take long."""

    allow_reuse_address = True
    daemon_threads = True

    @classmethod
    def on(cls, host: str, port: int, handler: type) -> _Server:
        cls.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return cls((host, port), handler)

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("a scrape from %s was not answered", client_address, exc_info=True)


@contextlib.contextmanager
def _reachable(path: Path) -> Iterator[str]:
    """A name of a socket that is short enough for one, however deep its folder is."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
