"""Finds records in whatever a job left behind: logs with any prefix, files of records, folders, compressed files, a pipe.

    for found in find(["logs/", "run.log.gz", "-"]):
        found.file, found.line, found.record, found.trouble

Lines are read one at a time and most are never decoded, so memory does not grow with a log. Invariant: what may have been a record is a
record or a trouble, never nothing: it was cut, torn by another process's write, hidden by a log shipper, or stands in a file that cannot be
read.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mx_common.errors import ConfigError
from mx_common.floor import IMPOSSIBLE_MARKER, INSTALLED_MARKER, MARKER, SLOW_MARKER

__all__ = ["Found", "find"]

_Item = tuple[dict[str, Any] | None, str]  # a record, or None and what is wrong
_TRUNCATED: _Item = (None, "truncated record")

_GZIP, _BZIP2, _XZ = b"\x1f\x8b", re.compile(rb"BZh[1-9]1AY&SY"), b"\xfd7zXZ\x00"
_UNREADABLE = {
    b"\x28\xb5\x2f\xfd": "zstd is not read: unpack it (zstd -d), or pipe it in (zstdcat FILE | mx gate -)",
    b"PK\x03\x04": "zip is not read: unpack it (unzip), or pipe it in (unzip -p FILE | mx gate -)",
    b"\xff\xfe": "UTF-16 is not read: pipe it in (iconv -f utf-16 -t utf-8 FILE | mx gate -)",
}

_NAMES = (IMPOSSIBLE_MARKER, SLOW_MARKER, MARKER, INSTALLED_MARKER)
_MARKERS = re.compile("|".join(map(re.escape, _NAMES)))
_COMMON = re.match(r"[A-Z]+_[A-Z]+_", MARKER)[0]  # type: ignore[index]  # what all markers begin with
_CUT_MARKER = re.compile(rf"{_COMMON[:3]}[A-Z_]*")
# What a line has that may concern us. A record begins with its schema and ends with rates or stages.
_HINTS = (_COMMON, "schema", "_gbps", "stages_s")
_MARKER_HINT, _SCHEMA_HINT, _RATE_HINT, _STAGES_HINT = (hint.encode() for hint in _HINTS)

_BEGINNING = '{"schema":"refit-'
_HEAD = re.compile(r'"schema\\*"\s*:\s*\\*"refit-')
_KEY = re.compile(
    r'(verdict|armed|floor|ceiling|wire_bytes|wire_s|implied_gbps|floor_gbps|ceiling_gbps|shortfall_x|excess_x|worker_id|stages_s)\\*"\s*:'
)
_OBJECT = re.compile(r"\{\s*(?:\\*[\"'&]|\}|$)")  # `{` as JSON has it, and not as awk and shells do
_QUOTED = re.compile(
    r'\{\s*\\(?:\\\\)*"(?:[^"\\]*(?:\\.[^"\\]*)*)', re.DOTALL
)  # an object in a quoted string, to the string's end
_BETWEEN = " \t\r\n:=|-"  # what may stand between a marker and its record

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_REPEATED = re.compile(r"\[repeated (\d+)x across cluster\]")
_PARTIAL = re.compile(rb"\S+ std(?:out|err) P ")  # a container runtime split the line here
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True)
class Found:
    """`record`: what was written, or None, and then `trouble` says what is wrong with the line. Line 1 stands for a file as a whole."""

    file: str
    line: int
    record: dict[str, Any] | None
    trouble: str = ""


def find(inputs: Sequence[str], stdin: IO[bytes] | None = None) -> Iterator[Found]:
    """Records of all inputs in order: files, folders (all their files, by name), `-` for `stdin` (None: the process's). Raises ConfigError
    for one that cannot be read."""
    for name in inputs:
        if name == "-":
            yield from _records("stdin", _stdin() if stdin is None else stdin)
            continue
        for path in _files(Path(name)):
            if path.is_symlink() and not path.exists():
                yield Found(str(path), 1, None, "a link to a file that is not there: copy the file too, or delete the link")
                continue
            try:
                with path.open("rb") as file:
                    yield from _records(str(path), file)
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error}") from error


def _stdin() -> IO[bytes]:
    if sys.stdin is None:
        raise ConfigError("- cannot be read: stdin is closed; pipe a log in, or give files")
    return sys.stdin.buffer


def _files(given: Path) -> Iterator[Path]:
    """The file itself, or all files of a folder by name, with what links in it lead to; each folder once, so that loops end."""
    try:
        if not given.is_dir():
            if not given.exists():
                raise ConfigError(f"{given} does not exist; give log files, folders of them, or - for a pipe")
            yield given
            return
    except OSError as error:
        raise ConfigError(f"{given} cannot be read: {error}") from error
    seen: set[tuple[int, int]] = set()
    waiting = [given]
    while waiting:
        path = waiting.pop()
        try:
            if path.is_dir():
                status = path.stat()
                if (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    waiting += sorted(path.iterdir(), reverse=True)
                continue
            wanted = not path.name.startswith(".") and (path.is_file() or (path.is_symlink() and not path.exists()))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}; make it readable, or give the files that count") from error
        if wanted:
            yield path


def _records(name: str, file: IO[bytes]) -> Iterator[Found]:
    buffered: Any = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)
    head = buffered.peek(16)[:16]
    for magic, advice in _UNREADABLE.items():
        if head.startswith(magic):
            yield Found(name, 1, None, advice)
            return
    number, raw, last = 0, b"\n", 0
    try:
        for number, raw in enumerate(_unpacked(buffered, head), start=1):
            split = b" P " in raw and _PARTIAL.match(raw) is not None
            keys = b'"' in raw and (_SCHEMA_HINT in raw or _RATE_HINT in raw or _STAGES_HINT in raw)
            if keys or split or _MARKER_HINT in raw:
                last = number
                for record, trouble in _of_line(raw, split or not raw.endswith(b"\n")):
                    yield Found(name, number, record, trouble)
        if last < number and not raw.endswith(b"\n"):
            for record, trouble in _of_line(raw, True):
                yield Found(name, number, record, trouble)
    except ImportError as error:
        yield Found(name, 1, None, f"this Python cannot unpack it: {error}")
    except (EOFError, OSError, zlib.error) as error:  # a file that was cut is evidence that was cut
        if isinstance(error, OSError) and error.errno is not None:  # unpackers know none
            raise
        yield Found(name, max(number, 1), None, f"truncated file: {error}")


def _unpacked(file: io.BufferedReader, head: bytes) -> Iterator[bytes]:
    """Lines of the file. Modules that some builds of Python lack are imported for the files that need them."""
    if head.startswith(_GZIP):
        return iter(gzip.GzipFile(fileobj=file))
    if _BZIP2.match(head):
        return _bzip2(file)
    return _xz(file) if head.startswith(_XZ) else iter(file)


def _bzip2(file: io.BufferedReader) -> Iterator[bytes]:
    import bz2

    with bz2.BZ2File(file) as unpacked:
        yield from unpacked


def _xz(file: io.BufferedReader) -> Iterator[bytes]:
    import lzma

    try:
        with lzma.LZMAFile(file) as unpacked:
            yield from unpacked
    except lzma.LZMAError as error:
        raise EOFError(str(error)) from error


def _of_line(raw: bytes, cut: bool) -> list[_Item]:
    text = raw.decode("utf-8", "replace").rstrip("\r\n")
    found = _scan(text, cut)
    repeated = _REPEATED.search(text) if found else None
    if repeated:
        advice = "set RAY_DEDUP_LOGS=0 where it runs, or MX_RECORDS_FILE"
        found.append((None, f"Ray left out records like this one ({repeated[1]}x across the cluster): {advice}"))
    return found


def _scan(text: str, cut: bool) -> list[_Item]:
    """Records of a text in order, and a trouble for each that is not whole. `cut`: more of the text was to follow."""
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    found: list[_Item] = []
    gap, done = "", 0
    for start, stop, inside in _objects(text, cut):
        gap, done = gap + text[done:start], stop
        if inside:
            if gap:
                found += _of_gap(gap, True, cut)
            found += inside
            gap = ""
        else:
            gap += "{}"  # somebody else's
    gap += text[done:]
    if gap:
        found += _of_gap(gap, False, cut)
    return found


def _objects(text: str, cut: bool) -> Iterator[tuple[int, int, list[_Item]]]:
    """Whole objects of a text that are in no other: from where to where, and the records they carry."""
    left = 16 * len(text) + 20_000_000  # characters to look at: hostile nesting must not take the square of a line's length
    start = text.find("{")
    while start >= 0 and left > 0:
        stop = start + 1
        quoted = _QUOTED.match(text, start)
        if quoted:
            stop = quoted.end()
            yield start, stop, _scan(_unquoted(quoted[0]), cut and stop >= len(text) - 1)
        else:
            try:
                value, stop = _DECODER.raw_decode(text, start)
            except json.JSONDecodeError as error:
                left -= error.pos  # it counts lines from the text's start
            except (ValueError, RecursionError):  # numbers of thousands of digits, nesting of thousands of levels
                left -= 10_000
            else:
                yield start, stop, _carried(value)
        start = text.find("{", stop)
    if start >= 0:
        yield start, len(text), [_TRUNCATED]


def _unquoted(text: str) -> str:
    try:
        return str(_DECODER.decode(f'"{text}"'))
    except ValueError:  # quoted by rules that are not JSON's
        return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)


def _carried(value: Any) -> list[_Item]:
    """Records in a JSON value: itself, one nested in it, or in the strings it holds."""
    found: list[_Item] = []
    alone = False  # a marker that is a string of its own belongs to a record beside it
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            schema = one.get("schema")
            if isinstance(schema, str) and schema.startswith("refit-"):
                found.append((one, ""))
            else:
                waiting.extend(reversed(one.values()))
        elif isinstance(one, list):
            waiting.extend(reversed(one))
        elif isinstance(one, str) and any(hint in one for hint in _HINTS):
            if one.strip() in _NAMES:
                alone = True
            else:
                found += _scan(one, False)
    return [*found, _TRUNCATED] if alone and not found else found


def _of_gap(gap: str, followed: bool, cut: bool) -> list[_Item]:
    """A trouble for each record of which only a part is left in a text between whole ones. `followed`: one comes after it."""
    parts = _MARKERS.split(gap)
    found: list[_Item] = []
    for place, part in enumerate(parts):
        last = place + 1 == len(parts)
        broken = (
            _HEAD.search(part) is not None or _lost_its_head(part) or ((last or followed) and _ends_early(part, followed, cut))
        )
        if place and not (last and followed):  # a marker, and no record
            broken = broken or followed or _OBJECT.search(part) is not None or part.lstrip(_BETWEEN).startswith("{")
            broken = broken or (last and not part.strip(_BETWEEN))
        if broken:
            found.append(_TRUNCATED)
    return found


def _lost_its_head(part: str) -> bool:
    keys = list(_KEY.finditer(part))
    if not keys or (len({key[1] for key in keys}) < 2 and keys[-1][1] != "implied_gbps"):
        return False
    rest = part[keys[-1].end() :]
    return "}" in rest and not rest.rstrip().endswith(",")


def _ends_early(part: str, followed: bool, cut: bool) -> bool:
    """Whether a text ends within a marker or within what every record begins with. Where a line was not cut, less of them is chance."""
    opened = part.rfind("{")
    if opened >= 0:
        beginning = re.sub(r"[\s\\]", "", part[opened : opened + 200])
        if _BEGINNING.startswith(beginning) and len(beginning) >= (1 if cut and not followed else 2 if followed else 11):
            return True
    if followed:  # torn: another process's line begins within this one's marker
        return any(_is_cut(match[0], len(_COMMON) + 2) for match in _CUT_MARKER.finditer(part))
    words = _CUT_MARKER.findall(part[-len(IMPOSSIBLE_MARKER) :])
    return bool(words) and part.endswith(words[-1]) and _is_cut(words[-1], 3 if cut else len(_COMMON) + 2, whole=True)


def _is_cut(word: str, least: int, whole: bool = False) -> bool:
    """Whether a word is (`whole`), or begins with, the first `least` or more characters of a marker."""
    if whole:
        return len(word) >= least and any(name.startswith(word) for name in _NAMES)
    return any(word.startswith(name[:least]) for name in _NAMES)
