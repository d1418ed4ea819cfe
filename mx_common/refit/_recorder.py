"""Watches a loader run on tensors without content, and notes what it would have written where.

    recorder = Recorder(params, tensors)
    with recorder:
        load_weights(recorder.feed())
    recorder.writes                          # in order: where, from which checkpoint tensors, and how

A tensor's storage says what it is: one of those fed, a parameter's, or scratch, of which is kept which fed tensors went into it. Invariant:
no parameter's memory is written, whether it is on meta or real: writes are checked for their shape and noted, never executed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mx_common.refit._views import Box, Layout, boxes, dense

__all__ = ["Home", "Recorder", "Write"]

_NONE: frozenset[str] = frozenset()
_MAX_BOXES = 4096
"""One copy that walks more boxes than this is left to the loader."""


@dataclass(frozen=True, eq=False)
class Home:
    """Memory of one parameter. `aliases`: every name that shares it, with the start and size of its box; None where it is none."""

    name: str
    tensor: torch.Tensor
    layout: Layout
    aliases: dict[str, tuple[tuple[int, ...], tuple[int, ...]] | None]


@dataclass(frozen=True, eq=False)
class Write:
    """`names`: the checkpoint tensors it comes from, none for a constant. `start`, `size`: the box of the parameter, None where it is not
    known. `source`: the box of the checkpoint tensor and, in bytes, where it lands; None where it is no view."""

    home: Home
    names: frozenset[str]
    start: tuple[int, ...] | None
    size: tuple[int, ...] | None
    source: Box | None
    src_dtype: torch.dtype
    dst_dtype: torch.dtype


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """`params`: by name, on meta or real. `tensors`: name -> (shape, dtype) of what is fed."""

    def __init__(self, params: Mapping[str, torch.Tensor], tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()
        self.writes: list[Write] = []
        self.spoiled: set[str] = set()  # fed tensors that were written themselves
        self.touched: frozenset[str] = _NONE  # what the loader last had in its hands
        self._tensors = tensors
        self._homes = _homes(params)
        self._fed: dict[int | None, tuple[str, frozenset[str], torch.UntypedStorage]] = {}
        self._scratch: dict[int | None, tuple[torch.UntypedStorage, frozenset[str]]] = {}
        self._written: dict[int | None, set[str]] = {}
        self._originals = {name: (tensor, _key(tensor)) for name, tensor in params.items()}

    def feed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the loader is given: each tensor on meta, dense, with a storage of its own."""
        for name, (shape, dtype) in self._tensors.items():
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            storage = tensor.untyped_storage()
            self.touched = frozenset((name,))
            self._fed[storage._cdata] = (name, self.touched, storage)
            yield name, tensor
            del tensor, storage
        self.touched = _NONE

    def homes(self) -> list[Home]:
        """Every parameter's memory, once."""
        return [home for homes in self._homes.values() for home in homes]

    def kept(self) -> set[str]:
        """Fed tensors that something still holds after the load: they serve in a way that no write shows."""
        count = torch._C._storage_Use_Count
        held = {name for key, (name, _, _) in self._fed.items() if count(key) > 1}
        return held.union(*(names for key, (_, names) in self._scratch.items() if count(key) > 1))

    def replaced(self) -> set[str]:
        """Parameters whose memory was exchanged instead of written."""
        return {name for name, (tensor, key) in self._originals.items() if _key(tensor) != key}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            fed = self._fed.get(_key(args[0]))
            self.touched = fed[1] if fed else self.touched
            return func(*args, **kwargs)
        if func is torch.ops.aten._foreach_copy_.default:
            for one, other in zip(args[0], args[1], strict=True):
                self.__torch_dispatch__(torch.ops.aten.copy_.default, types, (one, other))
            return None
        targets = [
            t for t in (args[at] if at < len(args) else kwargs.get(name) for at, name in _mutated(func)) if t is not None
        ]
        if targets:
            return self._write(func, _tensors(targets), args, kwargs)
        names = self._names_in(args, kwargs)
        self.touched = names or self.touched
        out = func(*args, **kwargs)
        if names:
            for tensor in _tensors((out,)):
                self._remember(tensor, names)
        return out

    def _names_of(self, tensor: torch.Tensor) -> frozenset[str]:
        key = _key(tensor)
        if key in self._fed:
            return self._fed[key][1]
        if key in self._written:
            return frozenset(self._written[key])
        return self._scratch[key][1] if key in self._scratch else _NONE

    def _names_in(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> frozenset[str]:
        names = _NONE
        for tensor in _tensors((*args, *kwargs.values())):
            names |= self._names_of(tensor)
        return names

    def _remember(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        key = _key(tensor)
        if key is None or key in self._fed or key in self._homes:
            return
        before = self._scratch[key][1] if key in self._scratch else _NONE
        self._scratch[key] = (tensor.untyped_storage(), before | names)

    def _write(self, func: Any, targets: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        overwrites = func in _OVERWRITES
        names = self._names_in(args[1:] if overwrites else args, kwargs)
        self.touched = names or self.touched
        executed = True
        for target in targets:
            key = _key(target)
            if key in self._fed:
                self.spoiled |= names | self._names_of(target)
            elif key in self._homes:
                executed = False
                source = args[1] if func is torch.ops.aten.copy_.default else None
                self._note(target, source, names)
            else:
                self._remember(target, names)
        if executed:
            return func(*args, **kwargs)
        if all(tensor.device.type == "meta" for tensor in _tensors((*args, *kwargs.values()))):
            return func(*args, **kwargs)  # nothing is written on meta, and shapes are checked as in earnest
        if func is torch.ops.aten.copy_.default and torch.broadcast_shapes(args[0].shape, args[1].shape) != args[0].shape:
            raise RuntimeError(f"a tensor of shape {tuple(args[1].shape)} does not go into one of shape {tuple(args[0].shape)}")
        return targets[0]

    def _note(self, target: torch.Tensor, source: Any, names: frozenset[str]) -> None:
        """A write to the parameter `target` is a view of, from the tensor `source` if it is a copy."""
        key = _key(target)
        self._written.setdefault(key, set()).update(names)
        if not target.numel():
            return
        home, at = _home_of(self._homes[key], target)
        fed = self._fed.get(_key(source)) if isinstance(source, torch.Tensor) else None
        if home is not None and at is not None and fed is not None and self._note_pieces(home, at, target, source, fed[0]):
            return
        region = None if home is None or at is None else boxes(home.layout, at, (0,) * len(at.size), 1)
        dtype = source.dtype if isinstance(source, torch.Tensor) else target.dtype
        for one in self._homes[key] if home is None else [home]:
            start, size = (region[0].start, region[0].size) if region else (None, None)
            self.writes.append(Write(one, names, start, size, None, dtype, target.dtype))

    def _note_pieces(self, home: Home, at: Layout, target: torch.Tensor, source: torch.Tensor, name: str) -> bool:
        shape, dtype = self._tensors[name]
        src, dst = source.dtype, target.dtype
        if src != dtype or dst != home.tensor.dtype:  # seen as other bits: a plain copy of bits, or no view
            if src != dst or dtype.itemsize != src.itemsize:
                return False
            src = dst = dtype
        view = source.expand(target.shape)
        found = boxes(
            dense(shape), Layout(view.storage_offset(), tuple(view.shape), tuple(view.stride())), at.stride, _MAX_BOXES
        )
        if found is None:
            return False
        itemsize = home.tensor.dtype.itemsize
        writes = []
        for box in found:
            lands = boxes(home.layout, Layout(at.offset + box.moved, box.size, box.moves), (0,) * len(box.size), 1)
            if lands is None:
                return False
            offset = (at.offset + box.moved - home.layout.offset) * itemsize
            in_bytes = Box(box.start, box.size, tuple(n * itemsize for n in box.moves), offset)
            writes.append(Write(home, frozenset((name,)), lands[0].start, lands[0].size, in_bytes, src, dst))
        self.writes += writes
        return True


_OVERWRITES = {
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
}


@cache
def _mutated(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that `func` writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple((at, one.name) for at, one in arguments if one.alias_info is not None and one.alias_info.is_write)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _key(tensor: torch.Tensor) -> int | None:
    try:
        key: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse and the like have none
        return None
    return key


def _layout(tensor: torch.Tensor) -> Layout:
    return Layout(tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor lies in: first, end."""
    first = tensor.storage_offset() * tensor.element_size()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) * tensor.element_size()
    return first, first + last + tensor.element_size()


def _homes(params: Mapping[str, torch.Tensor]) -> dict[int | None, list[Home]]:
    """By storage, its parameters; those whose memory overlaps are one, called by the largest one's first name."""
    by_storage: dict[int, list[str]] = {}
    for name, tensor in params.items():
        key = _key(tensor)
        if tensor.numel() and key is not None:
            by_storage.setdefault(key, []).append(name)
    homes: dict[int | None, list[Home]] = {}
    for key, names in by_storage.items():
        for group in _overlapping(names, params):
            first = max(group, key=lambda name: params[name].numel())
            aliases = {name: _box_in(params[first], params[name]) for name in group}
            homes.setdefault(key, []).append(Home(first, params[first], _layout(params[first]), aliases))
    return homes


def _box_in(whole: torch.Tensor, part: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    found = boxes(_layout(whole), _layout(part), (0,) * part.dim(), 1) if part.dtype == whole.dtype else None
    return (found[0].start, found[0].size) if found else None


def _overlapping(names: list[str], params: Mapping[str, torch.Tensor]) -> list[list[str]]:
    groups: list[list[str]] = []
    end = -1
    for name in sorted(names, key=lambda name: _span(params[name])[0]):
        first, last = _span(params[name])
        if first >= end:
            groups.append([])
        groups[-1].append(name)
        end = max(end, last)
    order = {name: at for at, name in enumerate(names)}
    return [sorted(group, key=order.__getitem__) for group in groups]


def _home_of(homes: list[Home], target: torch.Tensor) -> tuple[Home | None, Layout | None]:
    """The parameter that `target` is a view of, and where, in elements; no layout where their elements have different sizes."""
    first, end = _span(target)
    for home in homes:
        begin, stop = _span(home.tensor)
        if begin <= first and end <= stop:
            same = target.element_size() == home.tensor.element_size()
            return home, _layout(target) if same else None
    return None, None
