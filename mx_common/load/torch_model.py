"""A PyTorch engine's model as `mx_common.load` sees it; an adapter says how its engine makes one.

    class VllmModel(TorchModel):
        def create(self, fill): ...         # a module in the layout it serves in; `fill`: read its weights from storage
        def forget(self): ...               # out of the engine's own registries

Invariant: one model at a time, and after `discard` nobody holds a tensor of the last one.
"""

from __future__ import annotations

import abc
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mx_common.errors import LoadFailed, ManifestMismatch

__all__ = ["TorchModel", "named_tensors"]


class TorchModel(abc.ABC):
    """Implements `mx_common.load.EngineModel`. The finished model is in `model`; `hidden` says what of it other replicas could not see,
    or "". `without` is how to start the engine without this pack."""

    def __init__(self, engine: str, device: torch.device, without: str) -> None:
        self.engine, self.device, self._without = engine, device, without
        self.model: nn.Module | None = None
        self.hidden = ""
        self._restore: Callable[[], None] = lambda: None

    @abc.abstractmethod
    def create(self, fill: bool) -> nn.Module:
        """A model in the layout it serves in, post-processing included: with weights from storage, or undefined ones. Calls `processing`
        before its post-processing and `processed` after it."""

    def forget(self) -> None:  # noqa: B027  most engines are done with `remember`
        """Take the model that `create` made, or failed to make, out of the engine's registries; those that were given to `remember` are
        put back already."""

    def build(self) -> Mapping[str, torch.Tensor]:
        """Raises ManifestMismatch when post-processing hides weights: they could not be received."""
        self.model = self.create(fill=False).eval()
        if self.hidden:
            raise ManifestMismatch(self.hidden)
        return named_tensors(self.model, self.device)

    def load_from_storage(self) -> Mapping[str, torch.Tensor]:
        """The engine's own loader fills it."""
        self.model = self.create(fill=True).eval()
        return named_tensors(self.model, self.device)

    def discard(self) -> None:
        """Raises LoadFailed when some of its memory is still held."""
        watched = [weakref.ref(t) for t in ({} if self.model is None else named_tensors(self.model, self.device)).values()]
        self.model = None
        self._restore()
        self.forget()
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
        held = sum(1 for ref in watched if ref() is not None)
        if held:
            raise LoadFailed(
                f"{held} of {len(watched)} tensors of the model of a failed transfer are still held by {self.engine}; a second model "
                "beside them would not fit, or would share half-written buffers. Restart this replica with MX_LOAD_FALLBACK=storage and "
                f"{self._without}"
            )

    def remember(self, *registries: dict[Any, Any] | list[Any]) -> None:
        """What they hold now they hold again after `discard`; to be called by `create` before it makes a model."""
        content = [(registry, registry.copy()) for registry in registries]

        def restore() -> None:
            for registry, before in content:
                registry.clear()
                if isinstance(registry, dict):
                    registry.update(before)
                else:
                    registry.extend(before)

        self._restore = restore

    def processing(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """What there is before post-processing, to be given to `processed`."""
        return named_tensors(model, self.device)

    def processed(self, model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
        """Sets `hidden`: what post-processing emptied without new tensors to hold it."""
        after = named_tensors(model, self.device)
        emptied = [name for name, t in before.items() if t.numel() and name in after and not after[name].numel()]
        lost = sum(before[name].nbytes for name in emptied)
        gained = sum(t.nbytes for name, t in after.items() if name not in before or not before[name].numel())
        self.hidden = ""
        if gained < lost:
            self.hidden = (
                f"{self.engine} moved {lost - gained} bytes of {len(emptied)} tensors ({', '.join(emptied[:3])}, ...) out of sight after "
                "loading"
            )


def named_tensors(model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Every tensor of `model` that serving reads: parameters, buffers, and plain tensor attributes on `device`
    (attention keeps derived weights so)."""
    found: dict[str, torch.Tensor] = {name: p.data for name, p in model.named_parameters()}
    found.update(model.named_buffers())
    for name, tensor in _attributes(model):
        if tensor.device.type == device.type:
            found.setdefault(name, tensor)
    return found


def _attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{key}".lstrip("."), value
