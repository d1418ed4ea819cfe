"""The bytes of a shard table: a checksum, a small JSON header, compressed names, and columns cut to the width that their values need.

    manifest = encode(table)
    fields = decode(manifest)            # keyword arguments of ShardTable, agents still as plain fields

Layout, little-endian: magic (8 bytes), XXH3-128 of all that follows (16), length of the header (4), header, names joined by newlines and
deflated, agents' metadata, narrow columns, addresses, digests. A narrow column is its smallest value, in the header, and unsigned offsets
of 0, 1, 2, 4 or 8 bytes; 0 where all values are equal, which shapes, devices and most starts are.

Invariant: equal tables give equal bytes, and no damaged byte decodes: the checksum covers everything that it does not itself name.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from mx_common.errors import ManifestMismatch

if TYPE_CHECKING:
    from mx_common.refit.table import ShardTable

__all__ = ["decode", "encode"]

MAGIC = b"MXSHARD1"
CHECKED = 24  # where the checksummed part begins
MAX_RANK = 64
MAX_NAME_BYTES = 64 << 20  # of all names: what a header may make a receiver inflate

Values = npt.NDArray[Any]


def dtype_codes(dtype: tuple[str, ...]) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """The distinct dtypes in order of appearance, and the place of each tensor's among them."""
    if dtype.count(dtype[0] if dtype else "") == len(dtype):
        return dtype[:1], np.zeros(len(dtype), dtype=np.int64)
    known = tuple(dict.fromkeys(dtype))
    places = {one: place for place, one in enumerate(known)}
    return known, np.fromiter(map(places.__getitem__, dtype), dtype=np.int64, count=len(dtype))


def dtype_names(known: tuple[str, ...], codes: npt.NDArray[np.int64]) -> tuple[str, ...]:
    """The inverse of `dtype_codes`."""
    if len(known) < 2:
        return known * len(codes)
    return tuple(map(known.__getitem__, codes.tolist()))


def encode(table: ShardTable) -> bytes:
    """One byte string; see the layout above."""
    known, codes = dtype_codes(table.dtype)
    sizes = [int(table.itemsize[place]) for place in _first_places(codes, len(known))]
    names, raw = _deflated(table.names)
    columns = [
        *(table.ndim, codes, *table.shape.T),
        *(table.tensor, *table.start.T, *table.size.T, table.device, table.agent, np.diff(table.digest_offset)),
    ]
    narrow = [_narrowed(column) for column in columns]
    header = {
        "tensors": len(table.names),
        "shards": len(table),
        "dims": table.shape.shape[1],
        "names": [len(names), raw],
        "dtypes": list(zip(known, sizes, strict=True)),
        "agents": [[one.slot, one.name, one.mem, len(one.metadata), one.framework] for one in table.agents],
        "columns": [[width, base] for width, base, _ in narrow],
        "digests": len(table.digests),
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    rest = (
        len(head).to_bytes(4, "little"),
        head,
        names,
        *(one.metadata for one in table.agents),
        *(packed for _, _, packed in narrow),
        table.addr.astype("<u8", copy=False).tobytes(),
        table.digests.astype("<u8", copy=False).tobytes(),
    )
    body = b"".join(rest)
    return b"".join((MAGIC, xxhash.xxh3_128_digest(body), body))


def decode(manifest: bytes) -> dict[str, Any]:
    """The fields of a ShardTable, agents as tuples (slot, name, metadata, mem, framework). Raises ManifestMismatch, and nothing else, for
    bytes that `encode` did not write."""
    if manifest[: len(MAGIC)] != MAGIC:
        raise ManifestMismatch(
            f"a shard table begins with {MAGIC!r}, this one with {bytes(manifest[:8])!r}; "
            "trainer and receiver need the same version of this pack"
        )
    body = memoryview(manifest)[CHECKED:]
    if bytes(manifest[len(MAGIC) : CHECKED]) != xxhash.xxh3_128_digest(body):
        raise ManifestMismatch(
            f"a shard table of {len(manifest)} bytes is damaged or cut short; fetch it from its publisher again"
        )
    try:
        return _fields(body)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError, zlib.error) as error:
        raise ManifestMismatch(
            f"a shard table that cannot be read ({error}); trainer and receiver need the same version of this pack"
        ) from error


class _Reader:
    """Takes bytes off the front, and refuses to take more than there are."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def take(self, count: int) -> memoryview:
        if not 0 <= count <= len(self._data):
            raise ValueError(f"{count} bytes are expected where {len(self._data)} are left")
        taken, self._data = self._data[:count], self._data[count:]
        return taken

    def column(self, width: int, base: int, rows: int, dtype: type) -> Values:
        if width not in (0, 1, 2, 4, 8):
            raise ValueError(f"a column of {width} bytes a value")
        column: Values = np.full(rows, base, dtype=dtype)
        if width:
            column += np.frombuffer(self.take(width * rows), dtype=f"<u{width}").astype(dtype)
        return column

    def words(self, rows: int) -> Values:
        # a copy: the bytes may lie at an odd address, and must not keep the whole manifest alive
        return np.array(np.frombuffer(self.take(8 * rows), dtype="<u8"), dtype=np.uint64)

    def end(self) -> None:
        if len(self._data):
            raise ValueError(f"{len(self._data)} bytes follow the last column")


def _fields(body: memoryview) -> dict[str, Any]:
    reader = _Reader(body)
    head = json.loads(bytes(reader.take(int.from_bytes(reader.take(4), "little"))))
    tensors, shards, dims = (_whole(head[name], name) for name in ("tensors", "shards", "dims"))
    digests = _whole(head["digests"], "digests")
    packed, raw = (_whole(count, "names") for count in head["names"])
    # every row of the table is backed by bytes that are really here, so that a header cannot ask for more memory than that
    if not 1 <= dims <= MAX_RANK or raw > MAX_NAME_BYTES or tensors > raw + 1 or 8 * (shards + digests) > len(body):
        raise ValueError(
            f"{tensors} tensors, {shards} shards and {digests} digests of {dims} dims do not fit in {len(body)} bytes"
        )
    names = _inflated(bytes(reader.take(packed)), raw, tensors)
    agents = [
        (_text(slot), _text(name), bytes(reader.take(_whole(count, "metadata"))), _text(mem), _text(framework))
        for slot, name, mem, count, framework in head["agents"]
    ]
    described = iter(head["columns"])

    def take(rows: int, dtype: type = np.int64) -> Values:
        width, base = next(described, (None, None))
        if not isinstance(width, int) or not isinstance(base, int):
            raise ValueError("a column without a width and a base")
        return reader.column(width, base, rows, dtype)

    def take_dims(rows: int) -> Values:
        return _read_only(np.stack([take(rows) for _ in range(dims)], axis=1))

    ndim, codes, shape = take(tensors), take(tensors), take_dims(tensors)
    tensor, start, size = take(shards), take_dims(shards), take_dims(shards)
    device, agent, blocks = take(shards, np.uint64), take(shards), take(shards)
    if next(described, None) is not None:
        raise ValueError("more columns than are known")
    addr, flat = reader.words(shards), reader.words(digests)
    reader.end()
    known = tuple(_text(name) for name, _ in head["dtypes"])
    sizes = np.array([_whole(count, "itemsize") for _, count in head["dtypes"]], dtype=np.int64)
    if len(codes) and not 0 <= codes.min() <= codes.max() < len(known):
        raise ValueError("a dtype that the header does not list")
    return {
        "names": names,
        "dtype": dtype_names(known, codes) if tensors else (),
        "itemsize": _read_only(sizes[codes]),
        "shape": shape,
        "ndim": _read_only(ndim),
        "tensor": tensor,
        "start": start,
        "size": size,
        "addr": _read_only(addr),
        "device": _read_only(device),
        "agent": agent,
        "agents": agents,
        "digests": _read_only(flat),
        "digest_offset": _read_only(np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(blocks)))),
    }


def _first_places(codes: npt.NDArray[np.int64], count: int) -> Iterator[int]:
    return (int(np.argmax(codes == code)) for code in range(count))


def _narrowed(column: Values) -> tuple[int, int, bytes]:
    """Bytes a value, smallest value, offsets from it."""
    if not len(column):
        return 0, 0, b""
    low, high = column.min(), column.max()
    span = int(high) - int(low)
    width = next(width for width in (0, 1, 2, 4, 8) if span < 1 << (8 * width))
    return width, int(low), (column - low).astype(f"<u{width}").tobytes() if width else b""


@functools.lru_cache(maxsize=2)
def _deflated(names: tuple[str, ...]) -> tuple[bytes, int]:
    """Kept, as a trainer writes the same names with every version."""
    joined = "\n".join(names).encode()
    return zlib.compress(joined, 1), len(joined)


@functools.lru_cache(maxsize=4)
def _inflated(packed: bytes, raw: int, tensors: int) -> tuple[str, ...]:
    """Kept, as the tensor-parallel ranks of a trainer list the same names: equal tables then share one tuple."""
    machine = zlib.decompressobj()
    joined = machine.decompress(packed, raw + 1)
    if len(joined) != raw or not machine.eof or machine.unused_data:
        raise ValueError("names of another length than the header says")
    names = tuple(joined.decode().split("\n")) if tensors else ()
    if len(names) != tensors:
        raise ValueError(f"{len(names)} names of {tensors} tensors")
    return names


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {value!r}, not a count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} where a text belongs")
    return value


def _read_only(column: Values) -> Values:
    column.setflags(write=False)
    return column
