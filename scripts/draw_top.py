"""Draws the picture of `mx top` in its page, from a fleet that never changes.

    python scripts/draw_top.py            # write docs/images/top.svg
    python scripts/draw_top.py --check    # exit 1 when it is out of date

Invariant: the picture is what the command draws, names no host on the network, and is the same on every machine.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from pathlib import Path

from rich.console import Console

from mx_common.cli._top_frame import Snapshot, frame, what
from mx_common.cli.sources import SourceRow
from mx_common.directory import Activity, VersionInfo
from mx_common.directory.versions import State

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "top.svg"
COMMAND = "python scripts/draw_top.py"
WIDTH = 112
SERVING, TRAINED = "org/large-70b", "org/policy-8b"
GB = 10**9


def fleet() -> Snapshot:
    """Two replicas that load, two ranks of an engine that follow a trainer, and what they read from."""
    loads = [
        _load("5f1d77c20a9e", "node-11", "a94c01b7d3e2", "wire", 97, 141, 182.4, 4.3),
        _load("c07e5d41b8f6", "node-12", "a94c01b7d3e2", "wire", 31, 141, 176.9, 1.4),
        _load("0b8832d6e5aa", "node-27", "4411fe09c65d", "verify", 141, 141, 0.0, 6.9),
    ]
    refits = [
        Activity(
            f"refit-{rank}",
            f"7d20{rank}1ae94c8",
            TRAINED,
            "reshard",
            "node-03",
            rank,
            2,
            "vllm",
            412,
            "v412",
            ("rank0", "rank1", "rank2", "rank3"),
            "wire",
            done * GB // 10,
            8 * GB,
            rate,
            2.2,
        )
        for rank, done, rate in ((0, 61, 22.6), (1, 58, 21.9))
    ]
    sources = [
        _source("a94c01b7d3e2", 0.25, "r7", 4),
        _source("4411fe09c65d", 0.12, "r2", 21),
        _source("e3b90770c1f8", 0.91, "r2", 8),
        _source("77e05a2cd190", None, "r9", 132, "STALE"),
    ]
    slots = ("rank0", "rank1", "rank2", "rank3")
    versions = [
        VersionInfo("v413", TRAINED, 413, "run-a", State.STAGING, slots, ("rank2", "rank3"), 0, 413, "", 0, 1.0),
        VersionInfo("v412", TRAINED, 412, "run-a", State.READY, slots, (), 2, 412, "", 0, 38.0),
    ]
    return Snapshot(tuple(sources), (*loads, *refits), tuple(versions))


def _load(worker: str, host: str, source: str, stage: str, done: int, total: int, gbps: float, seconds: float) -> Activity:
    return Activity(
        f"load-{worker}",
        worker,
        SERVING,
        "load",
        host,
        engine="vllm",
        sources=(source,),
        stage=stage,
        bytes_done=done * GB,
        bytes_total=total * GB,
        gbps=gbps,
        seconds=seconds,
    )


def _source(worker: str, load: float | None, rack: str, age: float, status: str = "READY") -> SourceRow:
    return SourceRow(SERVING, 0, status, load, {"zone": "a", "rack": rack}, age, 0, "cuda", worker, "")


def render() -> str:
    """The picture's text."""
    console = Console(
        record=True,
        width=WIDTH,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
        legacy_windows=False,
        _environ={},
    )
    snapshot = fleet()
    console.print(f"{what(snapshot)} in the directory at 10.0.0.5:8001")
    console.print(frame(snapshot, WIDTH))
    # fonts of the machine do; a picture that asks the network for one is no document
    return re.sub(r",\s*url\([^)]*\) format\([^)]*\)", "", console.export_svg(title="mx top", unique_id="mx-top")) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write docs/images/top.svg.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the picture is out of date")
    arguments = parser.parse_args(argv)
    current = PICTURE.read_text("utf-8") if PICTURE.is_file() else ""
    if current == render():
        return 0
    if arguments.check:
        print(f"{PICTURE.name} is out of date; run: {COMMAND}", file=sys.stderr)
        return 1
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(render(), "utf-8")
    print(f"wrote {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
