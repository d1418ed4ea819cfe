"""vLLM's model as `mx_common.load` sees it: build, discard, load from storage.

Invariant: one model at a time. vLLM keeps layers in registries outside the model (its forward context, the rotary cache); `discard`
takes this model's out of them, so that the next one neither collides with it nor inherits half-written buffers from it.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from mx_common.errors import LoadFailed, ManifestMismatch

__all__ = ["VllmModel", "named_tensors", "storage_loader"]


class VllmModel:
    """Implements `mx_common.load.EngineModel`. The finished model is in `model`; `hidden` says what of it other replicas could not see,
    or ""."""

    def __init__(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str, load_config: LoadConfig) -> None:
        self.model: nn.Module | None = None
        self.hidden = ""
        self._vllm_config, self._model_config, self._prefix = vllm_config, model_config, prefix
        self._storage = storage_loader(load_config)
        self._device = torch.device(load_config.device or vllm_config.device_config.device)
        self._restore: Callable[[], None] = lambda: None

    def build(self) -> dict[str, torch.Tensor]:
        """Create the model and run vLLM's post-processing on its undefined values: that fixes the layout in which it serves.

        Raises ManifestMismatch when that hides weights: they could not be received.
        """
        self._create(lambda model: None)
        if self.hidden:
            raise ManifestMismatch(self.hidden)
        return named_tensors(self._model(), self._device)

    def load_from_storage(self) -> dict[str, torch.Tensor]:
        """Create the model, let vLLM's default loader fill it, and post-process."""
        self._create(lambda model: self._storage.load_weights(model, self._model_config))
        return named_tensors(self._model(), self._device)

    def discard(self) -> None:
        """Drop the model and everything vLLM remembers of it. Raises LoadFailed when some of its memory is still held."""
        tensors = {} if self.model is None else named_tensors(self.model, self._device)
        watched = [weakref.ref(tensor) for tensor in tensors.values()]
        del tensors
        self.model = None
        self._restore()
        rotary_embedding._ROPE_DICT.clear()
        gc.collect()
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()
        held = sum(1 for ref in watched if ref() is not None)
        if held:
            raise LoadFailed(
                f"{held} of {len(watched)} tensors of the model of a failed transfer are still held by vLLM; a second model beside "
                "them would not fit, or would share half-written buffers. Restart this replica with MX_LOAD_FALLBACK=storage and "
                "--load-format auto"
            )

    def _create(self, fill: Callable[[nn.Module], None]) -> None:
        self._restore = _remember_registries(self._vllm_config)
        with set_default_torch_dtype(self._model_config.dtype):
            with self._device:
                model = self._storage.create_model(self._vllm_config, self._model_config, self._prefix)
            fill(model)
            before = named_tensors(model, self._device)
            process_weights_after_loading(model, self._model_config, self._device)
            self.hidden = _hidden_by_processing(before, named_tensors(model, self._device))
        self.model = model.eval()

    def _model(self) -> nn.Module:
        assert self.model is not None, "no model has been built"
        return self.model


def storage_loader(load_config: LoadConfig) -> DefaultModelLoader:
    """vLLM's own loader for weights on storage, with this load's other settings."""
    plain = copy.copy(load_config)
    plain.load_format = "auto"
    plain.model_loader_extra_config = {}
    return DefaultModelLoader(plain)


def named_tensors(model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Every tensor of `model` that serving reads: parameters, buffers, and plain tensor attributes on `device`
    (attention keeps derived weights so)."""
    found: dict[str, torch.Tensor] = {name: p.data for name, p in model.named_parameters()}
    found.update(model.named_buffers())
    for name, tensor in _attributes(model):
        if tensor.device.type == device.type:
            found.setdefault(name, tensor)
    return found


def _hidden_by_processing(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> str:
    """What post-processing emptied without new tensors to hold it, or ""."""
    emptied = [name for name, t in before.items() if t.numel() and name in after and not after[name].numel()]
    lost = sum(before[name].nbytes for name in emptied)
    gained = sum(t.nbytes for name, t in after.items() if name not in before or not before[name].numel())
    if gained >= lost:
        return ""
    return (
        f"vLLM moved {lost - gained} bytes of {len(emptied)} tensors ({', '.join(emptied[:3])}, ...) out of sight after loading"
    )


def _attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{key}".lstrip("."), value


def _remember_registries(vllm_config: VllmConfig) -> Callable[[], None]:
    """A function that puts vLLM's registries of layers back to what they hold now."""
    compilation = vllm_config.compilation_config
    kept: list[tuple[Any, Any]] = [(compilation.static_forward_context, dict(compilation.static_forward_context))]
    kept.append((compilation.static_all_moe_layers, list(compilation.static_all_moe_layers)))

    def restore() -> None:
        for registry, content in kept:
            registry.clear()
            if isinstance(registry, dict):
                registry.update(content)
            else:
                registry.extend(content)

    return restore
