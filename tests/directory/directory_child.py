"""What the processes of the directory's tests do; each role prints lines that its test waits for.

python directory_child.py ROLE ARGUMENTS...
"""

from __future__ import annotations

import http.server
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from concurrent import futures

import grpc

from mx_common.directory import DirectoryServer, Leases, MemoryStore, SourcePublisher, WorkerServer, embedded
from mx_common.identity import Identity
from mx_common.wire import p2p


def serve(address, stale_seconds="90"):
    """A directory until stdin closes."""
    server = DirectoryServer(address, MemoryStore(stale_seconds=float(stale_seconds), remove_seconds=600)).start()
    print("serving", server.address)
    sys.stdin.read()
    server.stop()


def publisher(worker_id, address, interval="0.2", ready="ready", on_registered=None):
    return SourcePublisher(
        Identity(model_name="Org/Model", backend_framework=1, dtype="bfloat16"),
        p2p.WorkerMetadata(worker_rank=0, worker_grpc_endpoint="127.0.0.1:1"),
        worker_id,
        address=address or None,
        ready=lambda: ready == "ready",
        read_load=lambda: 0.25,
        interval=float(interval),
        poll_seconds=0.05,
        on_registered=on_registered,
    )


def source(worker_id, address="", interval="0.2", ready="ready"):
    """A source until stdin closes, then a normal exit without stop()."""
    published = publisher(worker_id, address, interval, ready).start()
    if ready == "ready" and published.wait_ready(20):
        print("ready", published.mx_source_id, "hosting" if embedded.hosted_here() else "guest")
    else:
        print("started")
    sys.stdin.read()


def source_with_handler(worker_id, address):
    """A source whose host handles SIGTERM itself, and goes on to exit with a status of its own."""

    def host_handler(number, frame):
        print("host handled", number)
        sys.exit(7)

    signal.signal(signal.SIGTERM, host_handler)
    source(worker_id, address)


def source_in_thread(worker_id, address):
    """A source that is started outside the main thread, where no signal handler can be set."""
    started = threading.Thread(target=lambda: publisher(worker_id, address).start())
    started.start()
    started.join()
    print("started; handler is default:", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    sys.stdin.read()


def _child(worker_id, address):
    published = publisher(worker_id, address).start()
    published.wait_ready(20)


def source_in_multiprocessing_child(worker_id, address):
    """A source in a multiprocessing child, which ends without running atexit."""
    child = multiprocessing.get_context("spawn").Process(target=_child, args=(worker_id, address))
    child.start()
    child.join()
    print("child ended", child.exitcode)


def race(start_at):
    """Ask for the embedded directory at the given moment, at once with others."""
    time.sleep(max(float(start_at) - time.time(), 0))
    address = embedded.resolve()
    print("resolved", address, "hosting" if embedded.hosted_here() else "guest")
    sys.stdin.read()


def host_with_forked_child():
    """Host the embedded directory and fork a child that sleeps; print the child's pid."""
    address = embedded.resolve()
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    print("hosting", address, child)
    sys.stdin.read()


def foreign(kind, port):
    """Something that is no directory on a port."""
    if kind == "http":
        server = http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), http.server.BaseHTTPRequestHandler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    elif kind == "silent":
        listener = socket.create_server(("127.0.0.1", int(port)))
        threading.Thread(target=lambda: [listener.accept() for _ in iter(int, 1)], daemon=True).start()
    else:
        other = grpc.server(futures.ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
        other.add_insecure_port(f"127.0.0.1:{port}")
        other.start()
    print("listening")
    sys.stdin.read()


def worker(port, mx_source_id, worker_id, ttl="60"):
    """A worker's control service; prints its endpoint."""
    manifest = p2p.GetTensorManifestResponse(tensors=[p2p.TensorDescriptor(name="w", size=8)])
    leases = Leases(float(ttl))
    server = WorkerServer(lambda: manifest, leases, worker_id, mx_source_id=mx_source_id, port=int(port)).start()
    print("endpoint", server.endpoint)
    for line in sys.stdin:
        if line.strip() == "count":
            print("open", leases.open_count())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    globals()[sys.argv[1]](*sys.argv[2:])
