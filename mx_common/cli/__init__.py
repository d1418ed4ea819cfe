"""The `mx` command.

    mx server                    run the directory as a service
    mx sources --watch           who serves what, how busy, where
    mx explain MODEL             which source this node would take, and why
    mx doctor                    is this machine able to move weights; exit 1 with the fix when not
    mx envs                      every variable, its value, where it comes from, whether it is valid

Invariant: commands print for people on a terminal and JSON with `--json`; errors of the pack are one line on stderr and exit code 1,
wrong usage is exit code 64.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from mx_common.cli import doctor, envs, explain, server, sources
from mx_common.errors import MxError

__all__ = ["app", "main"]

USAGE = 64

app = typer.Typer(
    name="mx",
    help="Moves model weights memory to memory between inference replicas.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("server")(server.command)
app.command("sources")(sources.command)
app.command("explain")(explain.command)
app.command("doctor")(doctor.command)
app.command("envs")(envs.command)


def main() -> None:
    """Entry point of the console script."""
    # typer carries a click of its own in some versions and imports the package in others: its own exception leads to the right one
    usage_error: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
    try:
        app(standalone_mode=False)
    except usage_error as error:
        error.show()
        sys.exit(USAGE)
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except MxError as error:
        Console(stderr=True, soft_wrap=True).print(f"mx: {error}", markup=False, highlight=False)
        sys.exit(1)
