"""Declares the operators whose schemas torchvision's Python side expects from its compiled part: non-maximum suppression, plain
and quantized. Declared only: no text model calls them, and a call says that there is no kernel.

Invariant: acts once, just before torchvision is first imported, and only where its compiled part has not declared them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# torch drops the declarations of a library object that is collected
_kept: list[object] = []


class DeclareOperators(MetaPathFinder):
    """Finds nothing; it is asked first, and that is the moment to act."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            declare()


def declare() -> None:
    """Make `torch.ops.torchvision.nms` and `qnms` known by their schemas."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            library.define(schema)
    _kept.append(library)
