"""Learns from an engine's own loader which box of each checkpoint tensor goes where: fused, sliced, transposed, stacked or renamed.

    params = dict(model.named_parameters()) | dict(model.named_buffers())           # on meta, laid out as the live model is
    captured = capture(model.load_weights, params, {"model.norm.weight": ((1024,), torch.bfloat16), ...})
    captured.pieces                          # written by one-sided reads
    captured.whole                           # pulled in full, given to the loader as ever

The loader is run once on tensors without content, and the copies it makes between views are noted, so an engine needs no table of its
layouts here and a new model needs no code. Invariant: a checkpoint tensor is either in `pieces` alone, and then the pieces are all that the
loader does with it, or in `whole`, or in `unused`; whatever is not plainly a copy of a view is `whole`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mx_common._frozen import FrozenMap
from mx_common.refit._cover import Cover, TooManyCells

if TYPE_CHECKING:
    import torch

    from mx_common.refit._recorder import Home, Recorder, Write

__all__ = ["Capture", "CapturedPiece", "capture"]

Facts = Mapping[str, "tuple[tuple[int, ...], torch.dtype]"]
LoadWeights = Callable[[Iterable[tuple[str, "torch.Tensor"]]], object]

_ALIKE = 3
"""So many tensors whose names differ in numbers only made the loader fail: the others of that pattern would too."""


@dataclass(frozen=True)
class CapturedPiece:
    """The box `start`, `size` of the checkpoint tensor `tensor` goes to the parameter `param`: its first element `offset` bytes from the
    parameter's, and `stride` bytes further a step, per dim of the checkpoint tensor. Where the dtypes differ, the copy converts."""

    tensor: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    param: str
    offset: int
    stride: tuple[int, ...]
    src_dtype: torch.dtype
    dst_dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the box, as published."""
        return math.prod(self.size) * int(self.src_dtype.itemsize)


@dataclass(frozen=True)
class Capture:
    """What the loader does with the tensors. No two pieces write the same byte.

    `whole`: to be pulled in full and given to the loader, with the reasons in `reasons`. `unused`: nothing of them serves.
    `uncovered`: parameter -> bytes that neither a piece nor a whole tensor nor a constant writes, where there are any: buffers that are
    derived, or a tensor the trainer does not publish. `failed`: those of `whole` that made the loader raise; what they would write is not
    known, so it may stand in `uncovered`.
    `constant`: parameter -> bytes that the loader fills by itself (padding), in parameters that pieces go to: they stay as they are.
    `overlaps`: (parameter, earlier tensor, later tensor) where the loader writes a byte twice; the later one is what serves.
    `needed`: bytes that serve of those of `whole` of which that is known.
    """

    pieces: tuple[CapturedPiece, ...]
    whole: tuple[str, ...]
    unused: tuple[str, ...]
    uncovered: Mapping[str, int]
    constant: Mapping[str, int]
    overlaps: tuple[tuple[str, str, str], ...]
    reasons: Mapping[str, str]
    failed: tuple[str, ...] = ()
    needed: Mapping[str, int] = field(default_factory=dict)

    def minimum_bytes(self, tensors: Facts) -> int:
        """Of these published tensors, the bytes that this rank's layout needs; a tensor of which that is not known counts whole."""
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in tensors.items()}
        return sum(piece.nbytes for piece in self.pieces) + sum(self.needed.get(name, sizes[name]) for name in self.whole)

    def left_to_loader(self, reasons: Mapping[str, str]) -> Capture:
        """The same with these tensors whole, and those that the loader writes over one of them: tensor -> why."""
        named = {name: self.reasons.get(name, why) for name, why in reasons.items()}
        later: dict[str, list[str]] = {}
        for _, earlier, after in self.overlaps:
            later.setdefault(earlier, []).append(after)
        ahead = list(named)
        while ahead:
            for name in later.get(ahead.pop(), ()):
                if name not in named:
                    named[name] = "it goes over a tensor that the loader installs"
                    ahead.append(name)
        needed = {**dict.fromkeys(named.keys() - set(self.whole), 0), **self.needed}
        for piece in self.pieces:
            if piece.tensor in named:
                needed[piece.tensor] += piece.nbytes
        return replace(
            self,
            needed=FrozenMap(needed),
            pieces=tuple(piece for piece in self.pieces if piece.tensor not in named),
            whole=tuple(dict.fromkeys((*self.whole, *named))),
            unused=tuple(name for name in self.unused if name not in named),
            reasons=FrozenMap({**named, **self.reasons}),
        )


def capture(load_weights: LoadWeights, params: Mapping[str, torch.Tensor], tensors: Facts) -> Capture:
    """Run `load_weights` on meta tensors and note what it writes to `params`.

    `params`: every parameter and buffer by name; on meta, or real, and then only read. Names that share memory are one parameter, called by
    the first of the largest. `tensors`: shape and dtype of each checkpoint tensor. A loader that raises is run again without the tensor it
    had in hand, so it must not keep state between runs. Raises nothing of the loader's: a loader that always fails has all tensors whole.
    """
    import torch

    from mx_common.refit._recorder import Recorder

    reasons: dict[str, str] = {}
    alike: Counter[str] = Counter()
    while True:
        recorder = Recorder(params, {name: fact for name, fact in tensors.items() if name not in reasons})
        try:
            with torch.no_grad(), recorder:
                load_weights(recorder.feed())
            break
        except Exception as error:
            why = f"the loader raised {type(error).__name__}: {error}"
        blamed = set(recorder.touched) - reasons.keys()
        for name in sorted(blamed):
            alike[_pattern(name)] += 1
        patterns = {_pattern(name) for name in blamed if alike[_pattern(name)] >= _ALIKE}
        blamed |= {name for name in tensors if name not in reasons and patterns and _pattern(name) in patterns}
        reasons.update(dict.fromkeys(blamed or tensors.keys() - reasons.keys(), why))
        if len(reasons) == len(tensors):  # nothing is left to feed
            recorder = Recorder(params, {})
            break
    return _Resolution(recorder, tensors, reasons).capture()


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)


class _Resolution:
    """From writes in their order to pieces that can be written in any order."""

    def __init__(self, recorder: Recorder, tensors: Facts, reasons: dict[str, str]) -> None:
        self._tensors, self._reasons = tensors, reasons
        self._failed = tuple(name for name in tensors if name in reasons)
        self._homes = recorder.homes()
        self._replaced = recorder.replaced()
        self._writes: dict[str, list[Write]] = {home.name: [] for home in self._homes}
        self._used = set(recorder.spoiled)
        for write in recorder.writes:
            self._writes[write.home.name].append(write)
            self._used |= write.names
            if write.source is None:
                self._leave(write.names, "the loader computes something from it")
        self._leave(recorder.spoiled, "the loader writes into the tensor it was given")
        self._leave(recorder.kept() - self._used, "the loader keeps the tensor itself")

    def _leave(self, names: Iterable[str], why: str) -> bool:
        """These are whole; whether that is news."""
        fresh = [name for name in names if name not in self._reasons]
        self._reasons.update(dict.fromkeys(fresh, why))
        return bool(fresh)

    def capture(self) -> Capture:
        covers = {home.name: self._cover(home) for home in self._homes}
        self._settle(covers)
        uncovered: dict[str, int] = {}
        constant: dict[str, int] = {}
        pieces: list[CapturedPiece] = []
        for home in self._homes:
            cover = covers[home.name]
            mine = [
                _piece(write)
                for index, write in enumerate(self._writes[home.name])
                if write.source is not None and not write.names & self._reasons.keys() and not (cover and index in cover.hidden)
            ]
            pieces += mine
            if cover is not None:
                self._count(home, cover, uncovered, constant if mine else {})
        order = {name: at for at, name in enumerate(self._tensors)}
        used = {piece.tensor for piece in pieces} | self._reasons.keys()
        return Capture(
            tuple(sorted(pieces, key=lambda piece: order[piece.tensor])),
            tuple(name for name in self._tensors if name in self._reasons),
            tuple(name for name in self._tensors if name not in used and 0 not in self._tensors[name][0]),
            FrozenMap(uncovered),
            FrozenMap(constant),
            tuple(sorted(self._overlaps(covers))),
            FrozenMap({name: self._reasons[name] for name in self._tensors if name in self._reasons}),
            self._failed,
        )

    def _cover(self, home: Home) -> Cover | None:
        """None where the boxes cannot be told apart at a sensible price: all that goes there is whole, and covers it."""
        everything = ((0,) * len(home.layout.size), home.layout.size)
        regions = [
            (w.start, w.size) if w.start is not None and w.size is not None else everything for w in self._writes[home.name]
        ]
        try:
            return Cover.of(home.layout.size, regions, [box for box in home.aliases.values() if box])
        except TooManyCells:
            self._leave(
                {name for write in self._writes[home.name] for name in write.names},
                "it goes to too many places of one parameter",
            )
            return None

    def _settle(self, covers: Mapping[str, Cover | None]) -> None:
        """Where two tensors write one byte and the order would matter, leave both to the loader; until that changes nothing more."""
        news = True
        while news:
            news = False
            for name, cover in covers.items():
                for before, after in cover.clashes if cover else ():
                    earlier, later = self._writes[name][before], self._writes[name][after]
                    assert cover is not None
                    if before in cover.hidden and not earlier.names & self._reasons.keys() and later.names:
                        continue  # the earlier one is simply not read
                    if earlier.names:
                        news |= self._leave(earlier.names | later.names, f"{name} is written twice, and the order matters")

    def _count(self, home: Home, cover: Cover, uncovered: dict[str, int], constant: dict[str, int]) -> None:
        itemsize = home.tensor.dtype.itemsize
        everything = ((0,) * len(home.layout.size), home.layout.size)
        plain = [index for index, write in enumerate(self._writes[home.name]) if not write.names]
        free = cover.owner < 0
        for name, box in home.aliases.items():
            missing = cover.elements(box or everything, free) * itemsize
            if missing and name not in self._replaced:
                uncovered[name] = missing
        if plain:
            import numpy as np

            filled = cover.elements(everything, np.isin(cover.owner, plain)) * itemsize
            if filled:
                constant[home.name] = filled

    def _overlaps(self, covers: Mapping[str, Cover | None]) -> set[tuple[str, str, str]]:
        found = set()
        for name, cover in covers.items():
            for before, after in cover.clashes if cover else ():
                for earlier in self._writes[name][before].names:
                    found |= {(name, earlier, later) for later in self._writes[name][after].names if later != earlier}
        return found


def _piece(write: Write) -> CapturedPiece:
    assert write.source is not None
    (tensor,) = write.names
    box = write.source
    return CapturedPiece(tensor, box.start, box.size, write.home.name, box.moved, box.moves, write.src_dtype, write.dst_dtype)
