"""Ctrl-C ends a command wherever it arrives."""

from __future__ import annotations

import subprocess
import sys

LOST = """
import os, signal, time
import mx_common.cli as cli

class Finaliser:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)

def app(standalone_mode):
    Finaliser()
    print("goes on", flush=True)
    time.sleep(60)

cli.app, cli.AGAIN_SECONDS = app, 0.2
cli.main()
"""


def test_an_interrupt_that_python_drops_in_a_finaliser_ends_the_command_all_the_same():
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout) == (130, "goes on\n")
