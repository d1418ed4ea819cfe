"""Runs every benchmark, each in a process of its own, and writes benchmarks/RESULTS.md.

    python -m benchmarks            # or: make bench; a few minutes

Invariant: RESULTS.md holds only what this run printed, with the command of each.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

RUNS = ("load_pull", "digest", "ordering", "idle_source", "target_memory", "planning", "shard_table", "refit")
RESULTS = Path(__file__).with_name("RESULTS.md")


def main() -> None:
    sections = [head()]
    for name in RUNS:
        module = f"benchmarks.{name}"
        print(f"== {module}", flush=True)
        done = subprocess.run([sys.executable, "-m", module, "--json"], check=True, stdout=subprocess.PIPE, text=True)
        figures = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(figures, indent=2), flush=True)
        sections.append(section(module, figures))
    RESULTS.write_text("\n".join(sections), encoding="utf-8")
    print(f"wrote {RESULTS}")


def head() -> str:
    """What was measured on what."""
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in ("torch", "nixl", "numpy"))
    return (
        "# Measured speed\n\n"
        "Written by `make bench`. Ratios of one run travel to other machines, absolute figures do not.\n\n"
        f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}, {versions}.\n"
    )


def section(module: str, figures: dict[str, object]) -> str:
    """One benchmark: what it says of itself, the command, the figures."""
    words = (import_module(module).__doc__ or "").strip()
    title, _, rest = words.partition("\n")
    prose = " ".join(line for line in rest.splitlines() if line and not line.startswith("    "))
    body = json.dumps(figures, indent=2)
    return f"## {title}\n\n{prose}\n\n`python -m {module} --json`\n\n```json\n{body}\n```\n"


if __name__ == "__main__":
    main()
