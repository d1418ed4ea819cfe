"""Tensors that transformers keeps fused in memory and stores apart: a box of `experts.gate_up_proj` as boxes of the checkpoint's experts.

    apart = stored_apart(model)                       # what transformers says of this model; no rule for most
    for part in apart(Held("model.layers.0.mlp.experts.gate_up_proj", (128, 1536, 2048), (64, 0, 0), local)):
        ...                                           # "model.layers.0.mlp.experts.64.gate_proj.weight", (768, 2048), ...

The rules are those that `save_pretrained` follows, read from transformers. Invariant: parts are views, so nothing is copied; what cannot
be a view of the fused tensor is refused by name, never published under a name that means something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mx_common.errors import ConfigError
from mx_common.refit.held import Held

if TYPE_CHECKING:
    import torch

__all__ = ["Apart", "split_box", "stored_apart"]

Apart = Callable[[Held], Iterator[Held]]

# how transformers takes a fused tensor apart, in its words: one tensor an expert, and gate and up one after the other in dim 1
_AN_EXPERT_EACH = ["SplitModulelist"]
_GATE_AND_UP = ["Chunk", "SplitModulelist"]


def stored_apart(model: torch.nn.Module) -> Apart:
    """Held boxes of the module's tensors -> held boxes of the checkpoint's. Raises ConfigError for a tensor that is stored transformed."""
    transforms = [transform for module in _outermost_models(model) for transform in _reversed_transforms(module)]
    if not transforms:
        return lambda held: iter((held,))
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    def apart(held: Held) -> Iterator[Held]:
        name, pattern = rename_source_key(held.name, renamings, converters, reverse=True)
        if pattern is None:
            yield Held(name, held.shape, held.start, held.tensor)
            return
        converter = by_pattern[pattern]
        steps = [type(step).__name__ for step in converter.operations]
        dims = [getattr(step, "dim", None) for step in converter.operations]
        wanted = converter.target_patterns
        if (steps, dims) not in ((_AN_EXPERT_EACH, [0]), (_GATE_AND_UP, [1, 0])) or "*" not in name or len(held.shape) < 2:
            raise ConfigError(
                f"{held.name} is stored transformed ({', '.join(steps)}), which no view of its memory can be; give a rename that leaves it "
                "out or, if the engine takes it as it is, one that returns the name unchanged"
            )
        yield from split_box(held, [name.replace(wanted[0], other) for other in wanted])

    return apart


def split_box(held: Held, names: list[str]) -> Iterator[Held]:
    """A box [experts, rows, ...] of a fused tensor: expert by expert, its rows cut into equal parts, one for each of `names`, in which `*`
    stands for the expert's number. Parts the box does not touch give nothing."""
    if held.shape[1] % len(names):
        raise ConfigError(f"{held.name}: {held.shape[1]} rows are not {len(names)} equal parts")
    each = held.shape[1] // len(names)
    first, stop = held.start[1], held.start[1] + held.tensor.shape[1]
    for at in range(held.tensor.shape[0]):
        for index, name in enumerate(names):
            low, high = max(first, index * each), min(stop, (index + 1) * each)
            if low < high:
                yield Held(
                    name.replace("*", str(held.start[0] + at)),
                    (each, *held.shape[2:]),
                    (low - index * each, *held.start[2:]),
                    held.tensor[at, low - first : high - first],
                )


def _outermost_models(model: torch.nn.Module) -> list[Any]:
    """The transformers models in `model` that are not inside another: at most one, but for modules that hold several."""
    found: list[Any] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) not in inside and hasattr(module, "config") and hasattr(module, "save_pretrained"):
            found.append(module)
            inside.update(id(child) for child in module.modules())
    return found


def _reversed_transforms(model: Any) -> list[Any]:
    """What `save_pretrained` applies to this model's names and tensors, in its order."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:  # before transformers 5 modules have the checkpoint's tensors
        return []
    known = getattr(model, "_weight_conversions", None)
    if known is None:  # not made by from_pretrained: nothing is known of a prefix
        known = [t for t in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(t, PrefixChange)]
    return [transform.reverse_transform() for transform in reversed(known)]
