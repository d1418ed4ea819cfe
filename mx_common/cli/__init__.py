"""The `mx` command.

    mx server                    run the directory as a service
    mx sources --watch           who serves what, how busy, where
    mx top                       who reads what from whom, how far, how fast
    mx explain MODEL             which source this node would take, and why
    mx doctor                    is this machine able to move weights; exit 1 with the fix when not
    mx gate LOGS...              fails a job for slow, impossible or unmeasured transfers: exit 1, or 2 without evidence
    mx report LOGS...            a page that shows a run: verdict, rates, stages, sources, links
    mx simulate --policy A,B     what policies would do to a fleet
    mx envs                      every variable, its value, where it comes from, whether it is valid

Invariant: commands print for people and JSON with `--json`. Exit codes: 0 fine, 1 something is wrong (one line on stderr says what),
64 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from importlib import metadata

import typer

from mx_common.cli import doctor, envs, explain, gate, report, server, simulate, sources, top
from mx_common.cli._output import line, make_console
from mx_common.errors import MxError

__all__ = ["app", "main"]

WRONG, USAGE, INTERRUPTED = 1, 64, 130
AGAIN_SECONDS = 5.0

app = typer.Typer(
    name="mx",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("server", short_help="Run the directory as a service.")(server.command)
app.command("sources", short_help="List who serves which weights, how busy, where.")(sources.command)
app.command("top", short_help="Watch loads, refits, versions and sources.")(top.command)
app.command("explain", short_help="Show which source this node would take, and why.")(explain.command)
app.command("doctor", short_help="Check this machine; exit 1 with the fix.")(doctor.command)
app.command("gate", short_help="Judge the records of a run; exit 1 for a regression, 2 without evidence.")(gate.command)
app.command("report", short_help="Write a page that shows a run: verdict, rates, stages, links.")(report.command)
app.command("simulate", short_help="Show what source policies do to a fleet; judge them.")(simulate.command)
app.command("envs", short_help="Show every variable, its value and validity.")(envs.command)


def _version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"mx-adapters {metadata.version('mx-adapters')}")
        except metadata.PackageNotFoundError:
            typer.echo("mx-adapters (not installed: run from a source tree)")
        raise typer.Exit()


@app.callback()
def _mx(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version and exit."),
) -> None:
    """Moves model weights memory to memory between inference replicas.

    \b
    Something does not work?   mx doctor
    Who serves what?           mx sources --watch
    Who reads, how fast?       mx top
    Why that source?           mx explain MODEL
    """


@contextlib.contextmanager
def _interrupts_that_last() -> Iterator[None]:
    """Ctrl-C ends a command. Python drops an interrupt that comes while a library's finaliser runs, so it is raised again until it does."""

    def interrupted(*_: object) -> None:
        again = threading.Timer(AGAIN_SECONDS, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        again.daemon = True
        again.start()
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a name that the terminal's encoding lacks must not end a report
            stream.reconfigure(errors="backslashreplace")
    # typer carries a click of its own in some versions and imports the package in others: its own exception leads to the right one
    usage_error: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
    try:
        with _interrupts_that_last():
            code = app(standalone_mode=False)
    except usage_error as error:
        error.show()
        sys.exit(USAGE)
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        # everything of ours is closed, and an orderly end would wait for threads of libraries that were interrupted
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(INTERRUPTED)
    except BrokenPipeError:
        # the reader of the pipe has seen enough; what is still buffered must not complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(WRONG)
    except MxError as error:
        line(make_console(stderr=True), f"mx: {error}")
        sys.exit(WRONG)
    sys.exit(code if isinstance(code, int) else 0)
