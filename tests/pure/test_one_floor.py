"""There is one place that computes a rate and spells a marker: every source file of the pack is looked at."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("mx_common", "adapters", "patches")
FLOOR = ROOT / "mx_common" / "floor.py"

MARKER = re.compile(r"MX_REFIT_(\w+_)?(THROUGHPUT|INSTALLED)|refit-(\w+-)?(throughput|installed)-")
VOLUME = re.compile(r"byte|octet|size|moved|volume|total|\bbits?\b|_bits", re.IGNORECASE)
# seconds, by the names people give them
TIME = re.compile(r"second|elapsed|duration|took|taken|wire_s\b|_s\b|\bdt\b|time|delta", re.IGNORECASE)


def names_in(node: ast.AST) -> str:
    """The identifiers and string keys of an expression."""
    words = []
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            words.append(part.id)
        elif isinstance(part, ast.Attribute):
            words.append(part.attr)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            words.append(part.value)
    return " ".join(words)


def violations(source: str) -> Iterator[str]:
    """What a file has that only the floor may have."""
    for found in MARKER.finditer(source):
        yield f"spells {found[0]}"
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        if VOLUME.search(names_in(node.left)) and TIME.search(names_in(node.right)):
            yield f"computes a rate: {ast.unparse(node)}"


def files() -> list[Path]:
    return [f for room in ROOMS for f in sorted((ROOT / room).rglob("*.py")) if "_generated" not in f.parts and f != FLOOR]


def test_no_file_but_the_floor_spells_a_marker_or_computes_a_rate() -> None:
    found = [f"{file.relative_to(ROOT)}: {what}" for file in files() for what in violations(file.read_text("utf-8"))]
    assert found == []


def test_the_source_tree_is_really_looked_at() -> None:
    looked_at = {f.relative_to(ROOT).parts[0] for f in files()}
    assert looked_at == set(ROOMS)
    assert ROOT / "mx_common" / "source_load.py" in files()
    assert len(list(violations(FLOOR.read_text("utf-8")))) >= 7


@pytest.mark.parametrize(
    "line",
    [
        "log.info('MX_REFIT_SLOW_THROUGHPUT %s', text)",
        "schema = 'refit-throughput-v1'",
        "rate = wire.wire_bytes * 8 / wire.wire_seconds / 1e9",
        "rate = total_bytes / (time.monotonic() - start)",
        "gbps = 8e-9 * moved / elapsed",
        "mb_per_s = result['size'] / max(result['duration'], 1e-9)",
        "rate = sum(t.nbytes for t in tensors) / took",
    ],
)
def test_a_second_spelling_or_rate_would_be_found(line: str) -> None:
    assert list(violations(line))


@pytest.mark.parametrize(
    "line",
    ["megabytes = size / 1e6", "seconds = nanoseconds / 1e9", "share = done_bytes / total_bytes", "path = root / 'size'"],
)
def test_what_is_no_rate_is_left_alone(line: str) -> None:
    assert not list(violations(line))
