"""A directory in a process, and a network namespace, of its own: `python -m tests.support.refit_directory HOST:PORT`."""

from __future__ import annotations

import sys

from mx_common.directory import DirectoryServer

if __name__ == "__main__":
    with DirectoryServer(sys.argv[1]) as server:
        print("serving", server.address, flush=True)
        sys.stdin.read()
