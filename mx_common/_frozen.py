"""A mapping that value types can hold: it behaves as the dict it was made from and cannot be changed.

    topology = FrozenMap({"rack": "r1"})

Invariant: equal content, equal hash (where the values can be hashed); it pickles, copies and goes into JSON as a dict does.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

__all__ = ["FrozenMap"]

K = TypeVar("K")
V = TypeVar("V")


class FrozenMap(dict[K, V]):
    """A dict whose content is fixed when it is made. Changing it raises TypeError."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenMap, (dict(self),)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("this mapping is part of a frozen value; build a new value with dataclasses.replace instead")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse
