"""Writes the configuration page from the table of environment variables, and the table of the metrics page from that of the metrics.

    python scripts/generate_docs.py            # write docs/configuration.md and the table in docs/metrics.md
    python scripts/generate_docs.py --check    # exit 1 when one is out of date

Invariant: what is written says nothing that `mx_common.envs` and `mx_common.metrics` do not, and is the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from mx_common import envs, metrics

DOCS = Path(__file__).resolve().parent.parent / "docs"
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


def render_metrics(page: str) -> str:
    """`page` with the table of metrics between its two marks."""
    begin, end = f"<!-- Made by `{COMMAND}` from mx_common/metrics.py; do not edit. -->\n", "<!-- end of the table -->"
    before, found, rest = page.partition(begin)
    _, also_found, after = rest.partition(end)
    if not found or not also_found:
        raise SystemExit(f"metrics.md has lost its marks: {begin.strip()} and {end}")
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in metrics.TABLE.metrics.values():
        labels = "; ".join(
            f"`{label.name}`" + (f": {', '.join(label.values)}" if label.values else "") for label in metric.labels
        )
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {_cell(metric.meaning)} |")
    return before + begin + "\n" + "\n".join(rows) + "\n\n" + end + after


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write what the documentation says of environment variables and metrics.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is out of date")
    parser.add_argument("--docs", type=Path, default=DOCS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    pages: dict[Path, Callable[[str], str]] = {
        arguments.docs / "configuration.md": lambda _: render(),
        arguments.docs / "metrics.md": render_metrics,
    }
    for page, rendered in pages.items():
        current = page.read_text("utf-8") if page.is_file() else ""
        wanted = rendered(current)
        if current == wanted:
            continue
        if arguments.check:
            print(f"{page.name} is out of date; run: {COMMAND}", file=sys.stderr)
            return 1
        page.write_text(wanted, "utf-8")
        print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
