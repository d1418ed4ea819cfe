"""Writes the configuration page from the table of environment variables.

    python scripts/generate_docs.py            # write docs/configuration.md
    python scripts/generate_docs.py --check    # exit 1 when it is out of date

Invariant: the page says nothing that `mx_common.envs` does not, and is the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mx_common import envs

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
COMMAND = "python scripts/generate_docs.py"

HEADER = f"""\
<!-- Made by `{COMMAND}` from mx_common/envs.py; do not edit. -->

# Configuration

Every setting is an environment variable, read when it is needed. `mx envs` shows their values in a shell, and whether they are valid.

A bad value is never used. A variable marked *stops* decides what happens: a command or a load that needs it stops and names the
variable, its value and what is allowed. The others tune or observe: their default is used, with one warning. Empty text counts as
unset.

The keys of an engine's `--model-loader-extra-config` override some of them for that engine: see [vllm.md](vllm.md#settings-of-one-engine).
"""


def render() -> str:
    """The page's text."""
    groups: dict[str, list[envs.Var[object]]] = {}
    for var in envs.TABLE.values():
        groups.setdefault(var.group, []).append(var)
    parts = [HEADER]
    for group, variables in groups.items():
        rows = ["| variable | type | default | allowed | a bad value | meaning |", "|---|---|---|---|---|---|"]
        rows += [_row(var) for var in variables]
        parts.append(f"## {group}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _row(var: envs.Var[object]) -> str:
    cells = [
        f"`{var.name}`",
        var.kind,
        var.shown_default,
        var.allowed or "any text",
        "stops" if var.strict else "warns",
        var.meaning,
    ]
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write docs/configuration.md from the table of environment variables.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is out of date")
    parser.add_argument("--page", type=Path, default=PAGE, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    current = arguments.page.read_text("utf-8") if arguments.page.is_file() else ""
    if current == render():
        return 0
    if arguments.check:
        print(f"{arguments.page.name} is out of date; run: {COMMAND}", file=sys.stderr)
        return 1
    arguments.page.write_text(render(), "utf-8")
    print(f"wrote {arguments.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
