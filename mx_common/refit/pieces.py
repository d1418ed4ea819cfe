"""What a receiver wants: boxes of global tensors, each with the place it goes to, as columns.

    pieces = Pieces.of([Piece("model.layers.0.mlp.down_proj.weight", start=(0, 384), size=(2048, 384), addr=parameter.data_ptr(),
                              stride=(768, 2), itemsize=2)])
    plan = make_plan(table, pieces)

A piece is written with the bytes of the source's dtype: where the destination has another one, or cannot be a view, the piece points at
staging memory instead. Invariant: columns are read-only and of one length; boxes have no negative side, and the elements of one piece lie
at different addresses. Two pieces that write the same address are the caller's mistake, which is not looked for here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mx_common.errors import ConfigError
from mx_common.transport._columns import MEMORY_KINDS

__all__ = ["Piece", "Pieces", "fixed"]

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Uint64 = npt.NDArray[np.uint64]


def fixed(owner: str, name: str, values: npt.ArrayLike, dtype: type[np.generic], ndim: int = 1) -> npt.NDArray[Any]:
    """`values` as a read-only array of `dtype`; raises ConfigError when they are not whole numbers that fit, or of another rank."""
    given: npt.NDArray[Any] = np.asarray(values)
    if given.size == 0 and given.ndim < ndim:
        given = given.reshape((0,) + (1,) * (ndim - 1))
    if given.ndim != ndim or (given.size and given.dtype.kind not in "iu"):
        raise ConfigError(f"{owner}.{name} is {ndim}-D, of whole numbers; got shape {given.shape}, dtype {given.dtype}")
    if given.size and given.dtype.kind == "i" and np.dtype(dtype).kind == "u" and int(given.min()) < 0:
        raise ConfigError(f"{owner}.{name} has the negative value {int(given.min())}")
    column = given.astype(dtype, copy=True)
    column.setflags(write=False)
    return column


@dataclass(frozen=True)
class Piece:
    """One row, for callers that have few: a box of the tensor `name` and where its first element goes; `stride` in bytes a dim."""

    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    addr: int
    stride: tuple[int, ...]
    itemsize: int
    device: int = 0


@dataclass(frozen=True, eq=False)
class Pieces:
    """P boxes of at most D dims. `names`: distinct tensors; `tensor` [P]: index into them; `start`, `size` [P, D]: the box in global
    coordinates, padded with 0 and 1 on the right; `addr` [P]: destination of its first element; `stride` [P, D]: destination bytes from one
    element to the next of each dim; `itemsize` [P]: bytes of an element; `device` [P]; `mem`: kind of all destinations.

    Raises ConfigError for columns that do not fit together, and for destinations in which elements would share an address.
    """

    names: tuple[str, ...]
    tensor: Int32
    start: Int64
    size: Int64
    addr: Uint64
    stride: Int64
    itemsize: Int64
    device: Uint64
    mem: str = "DRAM"

    def __post_init__(self) -> None:
        for name, dtype, ndim in (
            ("tensor", np.int32, 1),
            ("start", np.int64, 2),
            ("size", np.int64, 2),
            ("addr", np.uint64, 1),
            ("stride", np.int64, 2),
            ("itemsize", np.int64, 1),
            ("device", np.uint64, 1),
        ):
            object.__setattr__(self, name, fixed("Pieces", name, getattr(self, name), dtype, ndim))
        object.__setattr__(self, "names", tuple(self.names))
        rows = {name: len(getattr(self, name)) for name in ("tensor", "start", "size", "addr", "stride", "itemsize", "device")}
        if len(set(rows.values())) > 1:
            raise ConfigError(f"the columns of Pieces have different lengths ({rows}); give one value a piece in each")
        if not self.start.shape == self.size.shape == self.stride.shape:
            raise ConfigError("start, size and stride of Pieces have different ranks; pad with 0, 1 and 0 on the right")
        if len(set(self.names)) != len(self.names):
            raise ConfigError("Pieces.names has a name twice; names are distinct, and pieces index them")
        if self.mem not in MEMORY_KINDS:
            raise ConfigError(f"Pieces.mem is {self.mem!r}; known memory kinds: {', '.join(MEMORY_KINDS)}")
        if len(self):
            self._check_rows()

    def _check_rows(self) -> None:
        if int(self.tensor.min()) < 0 or int(self.tensor.max()) >= len(self.names):
            raise ConfigError(f"Pieces.tensor has an index outside its {len(self.names)} names")
        wanted = (self.size > 0).all(axis=1)
        for bad, why in (
            (
                (self.start < 0).any(axis=1) | (self.size < 0).any(axis=1),
                "has a negative side; give a box in global coordinates",
            ),
            (self.itemsize <= 0, "has elements of no bytes; give the source dtype's size"),
            (wanted & (self.addr == 0), "goes to address 0; give the address of allocated memory"),
            (
                wanted & self._shares_addresses(),
                "has elements that share addresses; give the byte strides of a view without overlap",
            ),
        ):
            if bad.any():
                row = int(np.flatnonzero(bad)[0])
                raise ConfigError(f"piece {row} of {self.names[self.tensor[row]]} {why}")

    def _shares_addresses(self) -> npt.NDArray[np.bool_]:
        """Whether a dim steps less far than all smaller-stepping dims reach, per piece: the test that views of dense memory pass."""
        sides = np.where(self.size > 1, self.stride, 0)
        order = np.argsort(sides, axis=1, kind="stable")
        step = np.take_along_axis(sides, order, axis=1)
        count = np.take_along_axis(np.where(self.size > 1, self.size, 1), order, axis=1)
        reach = self.itemsize.copy()
        bad = np.zeros(len(self), dtype=np.bool_)
        for dim in range(step.shape[1]):
            moves = count[:, dim] > 1
            bad |= moves & (step[:, dim] < reach)
            reach = np.where(moves, step[:, dim] * (count[:, dim] - 1) + reach, reach)
        # a dim of one element never steps, so that its stride says nothing; a negative one was never bigger than the reach
        return bad | ((self.size > 1) & (self.stride < 0)).any(axis=1)

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def nbytes(self) -> Int64:
        """Bytes of each piece [P]."""
        nbytes: Int64 = self.size.prod(axis=1) * self.itemsize
        return nbytes

    def taken(self, rows: npt.NDArray[Any]) -> Pieces:
        """These pieces only (indices or a mask), under the same names: what a partial refit asks for."""
        names = ("tensor", "start", "size", "addr", "stride", "itemsize", "device")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    @classmethod
    def of(cls, pieces: Sequence[Piece], mem: str = "DRAM") -> Pieces:
        """Columns of single pieces, padded to the largest rank. Raises ConfigError when a piece's start, size and stride differ in rank."""
        names = {name: index for index, name in enumerate(dict.fromkeys(piece.name for piece in pieces))}
        ndim = max((len(piece.size) for piece in pieces), default=1) or 1
        for piece in pieces:
            if not len(piece.start) == len(piece.size) == len(piece.stride):
                raise ConfigError(
                    f"{piece.name}: start {piece.start}, size {piece.size} and stride {piece.stride} differ in rank"
                )
        return cls(
            tuple(names),
            np.array([names[piece.name] for piece in pieces], dtype=np.int32),
            padded([piece.start for piece in pieces], ndim, 0),
            padded([piece.size for piece in pieces], ndim, 1),
            np.array([piece.addr for piece in pieces], dtype=np.uint64),
            padded([piece.stride for piece in pieces], ndim, 0),
            np.array([piece.itemsize for piece in pieces], dtype=np.int64),
            np.array([piece.device for piece in pieces], dtype=np.uint64),
            mem,
        )


def padded(rows: Sequence[tuple[int, ...]], ndim: int, fill: int) -> Int64:
    """(len(rows), ndim), short rows filled up on the right."""
    return np.array([tuple(row) + (fill,) * (ndim - len(row)) for row in rows], dtype=np.int64).reshape(len(rows), ndim)
