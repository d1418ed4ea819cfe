"""Finds records in whatever a job left behind: logs with any prefix, files of records, folders, gzip, a pipe.

    for found in find(["logs/", "run.log.gz", "-"], stdin):
        found.file, found.line, found.record, found.trouble

Lines are read one at a time and most are never decoded, so memory does not grow with a log. Invariant: a line that carries a marker gives a
record or a trouble, never nothing.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mx_common.errors import ConfigError
from mx_common.floor import IMPOSSIBLE_MARKER, INSTALLED_MARKER, MARKER, SLOW_MARKER

__all__ = ["Found", "find"]

_GZIP = b"\x1f\x8b"
_MARKERS = re.compile("|".join(re.escape(marker) for marker in (IMPOSSIBLE_MARKER, SLOW_MARKER, MARKER, INSTALLED_MARKER)))
_COMMON = re.match(r"[A-Z]+_[A-Z]+_", MARKER)[0].encode()  # type: ignore[index]  # what all markers begin with, to look for in bytes
_SCHEMA = b'"schema"'
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Found:
    """`record`: what was written, or None, and then `trouble` says what is wrong with the line."""

    file: str
    line: int
    record: dict[str, Any] | None
    trouble: str = ""


def find(inputs: Sequence[str], stdin: IO[bytes]) -> Iterator[Found]:
    """Records of all inputs in order: files, folders (all their files, by name), `-` for `stdin`. Raises ConfigError for one that cannot be
    read."""
    for name in inputs:
        if name == "-":
            yield from _records("stdin", stdin)
            continue
        for path in _files(Path(name)):
            try:
                with path.open("rb") as file:
                    yield from _records(str(path), file)
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error}") from error


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(inner for inner in path.rglob("*") if inner.is_file() and not inner.name.startswith("."))
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give log files, folders of them, or - for a pipe")
    return [path]


def _records(name: str, file: IO[bytes]) -> Iterator[Found]:
    buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)  # type: ignore[type-var]
    source: Any = gzip.GzipFile(fileobj=buffered) if buffered.peek(2)[:2] == _GZIP else buffered
    number = 0
    try:
        for number, raw in enumerate(source, start=1):
            if _COMMON in raw or _SCHEMA in raw:
                for record, trouble in _of_line(raw.decode("utf-8", "replace").rstrip("\r\n")):
                    yield Found(name, number, record, trouble)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:  # a file that was cut is evidence that was cut
        yield Found(name, number, None, f"truncated file: {error}")


def _of_line(line: str) -> Iterator[tuple[dict[str, Any] | None, str]]:
    text = _ESCAPES.sub("", line)
    marked = list(_MARKERS.finditer(text))
    if not marked:
        record = _bare(text)
        if record is not None:
            yield record, ""
        return
    inside = _strings(text)
    if inside:  # the whole line is a JSON document whose message carries the record
        for message in inside:
            yield from _of_line(message)
        return
    for place, match in enumerate(marked):
        stop = marked[place + 1].start() if place + 1 < len(marked) else len(text)
        rest = text[match.end() : stop].lstrip(" \t:=|-")
        if rest and not rest.startswith("{"):
            continue  # somebody speaks of the marker
        record = _decoded(rest)
        yield (record, "") if record is not None else (None, "truncated record")


def _bare(text: str) -> dict[str, Any] | None:
    """The record of a line of a records file, which may have a prefix. Lines that only look like one are somebody else's."""
    start = text.find("{")
    while start >= 0:
        record = _decoded(text[start:])
        if record is not None and str(record.get("schema", "")).startswith("refit-"):
            return record
        start = text.find("{", start + 1)
    cut = re.search(r'"schema": ?"refit-', text) and not text.rstrip().endswith("}")
    return {} if cut else None


def _strings(text: str) -> list[str]:
    """Values of a JSON object that carry a marker; none when the line is no JSON object."""
    if not text.lstrip().startswith("{"):
        return []
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [value for value in whole.values() if isinstance(value, str) and _MARKERS.search(value)]


def _decoded(text: str) -> dict[str, Any] | None:
    try:
        record, _ = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
