"""A live vLLM model as `mx_common.refit` sees it: what its loader does with a checkpoint's tensors, and how they get in.

    engine = VllmRefit(vllm_config, model_config, device, model)           # in a worker, after loading
    engine.capture({"model.norm.weight": ((1024,), torch.bfloat16), ...}).pieces

vLLM records, when it builds a model, the tensors that its loaders expect. The capture runs the model's own loader on those, on meta, in the
live modules; a second model would collide with the first in vLLM's registries, and its expert maps would be on meta too. Layers that vLLM
repacks after loading serve from another layout: their tensors go whole through vLLM's layerwise reload, which repacks them in place.

Invariant: a live parameter keeps its address; `capture` leaves the model exactly as it was, whatever the loader raises.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, layerwise
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

from mx_common.errors import ConfigError, CoverageError, WeightsBroken
from mx_common.refit.capture import Capture, capture
from mx_common.refit.engine import TensorFacts
from mx_vllm.loader import withdraw

__all__ = ["VllmRefit"]

log: logging.Logger = init_logger("vllm.mx")

_SAME_LAYOUT = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels for experts that read the weights as they were loaded. The others swap or pack them, some under the same shape."""


class VllmRefit:
    """Implements `mx_common.refit.engine.RefitEngine` for one worker. `version`: what was last installed, None before.

    Raises ConfigError where experts move while serving (EPLB): a captured place would be another expert's later."""

    def __init__(self, vllm_config: VllmConfig, model_config: ModelConfig, device: torch.device, model: nn.Module) -> None:
        if vllm_config.parallel_config.enable_eplb:
            raise ConfigError("a refit cannot follow experts that vLLM moves between ranks: start vLLM without --enable-eplb")
        self.version: int | None = None
        self._vllm_config, self._model_config, self._device, self._model = vllm_config, model_config, device, model
        self._reloading: list[nn.Module] | None = None
        self._kernels: list[tuple[Any, Any]] = []
        self._pauses = 0

    def parameters(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers on the serving device, under every name; empty ones (packed away) left out."""
        live = {name: t.data for name, t in _named(self._model).items()}
        return {name: t for name, t in live.items() if t.numel() and t.device.type == self._device.type}

    def capture(self, tensors: TensorFacts) -> Capture:
        """Raises CoverageError when a layer that has to be repacked would get only a part of its tensors."""
        live = self.parameters()
        changed = self._changed()
        with set_current_vllm_config(self._vllm_config), disable_mtp_completeness_check(), _as_loaded(self._model) as expected:
            found = capture(lambda weights: self._model.load_weights(weights), expected, tensors)
            sizes = {name: tensor.nbytes for name, tensor in expected.items()}
        whole: dict[str, str] = {}
        shared = _by_address(live)
        for piece in found.pieces:
            names = shared.get(_address(live[piece.param]), [piece.param]) if piece.param in live else [piece.param]
            layers = changed.keys() & {name.rpartition(".")[0] for name in names}
            if layers or piece.param not in live:
                whole[piece.tensor] = f"vLLM serves {piece.param} in another layout than it loads it"
        if not found.failed:
            _check_whole_layers(changed, sizes, found.uncovered)
        for param, earlier, later in found.overlaps:
            log.warning("%s and %s are the same parameter %s here: the engine serves %s", earlier, later, param, later)
        return found.left_to_loader(whole)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Through the model's own loader: in place, or repacked in place. A layer may come in several calls while `paused` is open."""
        with self.paused(), set_current_vllm_config(self._vllm_config), disable_mtp_completeness_check(), torch.no_grad():
            if self._reloading is None:
                self._begin()
            # vLLM keeps what it is given until a layer is complete, and the caller's memory holds other tensors by then
            given = ((name, t.clone()) for name, t in tensors) if self._reloading else tensors
            self._model.load_weights(given)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A worker runs one call at a time, so nothing is served inside; leaving it repacks and derives what was loaded."""
        if not self._pauses:
            withdraw(self._model)  # other replicas would read weights whose digests do not hold any more
            if self._device.type != "cpu":
                torch.accelerator.synchronize()
        self._pauses += 1
        try:
            yield
            if self._pauses == 1:
                self._finish()
        except BaseException:
            self._abandon()
            raise
        finally:
            self._pauses -= 1

    def installed(self, version: int) -> None:
        """Report this version, and serve again."""
        self.version = version
        refusal = _refusals.pop(self._model, None)
        if refusal is not None:
            refusal.remove()

    @property
    def refused(self) -> str:
        """Why nothing is served, or ""."""
        refusal = _refusals.get(self._model)
        return "" if refusal is None else refusal.reason

    def refuse(self, reason: str) -> None:
        """From now on a step fails with WeightsBroken, which ends vLLM's engine if one is asked for before a whole version came."""
        if self._model not in _refusals:
            _refusals[self._model] = _Refusal(self._model, reason)

    def _changed(self) -> dict[str, nn.Module]:
        """Layers that serve from another layout than their loaders write, by name."""
        return {name: layer for name, layer in self._model.named_modules() if not _serves_as_loaded(layer)}

    def _begin(self) -> None:
        """vLLM's `initialize_layerwise_reload`, for the repacked layers alone: the others are written in place."""
        self._reloading = []
        for layer in self._changed().values():
            info = layerwise.get_layerwise_info(layer)
            info.kernel_tensors = get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            self._reloading.append(layer)
            restore_layer_on_meta(layer, info)
            layerwise.initialize_online_processing(layer)
            method = getattr(layer, "quant_method", None)
            if type(method) is UnquantizedFusedMoEMethod and method.unquantized_backend is UnquantizedMoeBackend.CPU:
                # 0.32 packs experts for the CPU only when their kernel is made; a reload would serve them unpacked
                self._kernels.append((method, method.moe_kernel))
                method.moe_kernel = None

    def _finish(self) -> None:
        with set_current_vllm_config(self._vllm_config), torch.no_grad():
            reloaded, self._reloading = self._reloading, None
            try:
                if reloaded:
                    finalize_layerwise_reload(self._model, self._model_config)
            except BaseException:
                self._reloading = reloaded
                raise
            self._restore_kernels()
            self._derive(reloaded or [])
        if self._device.type != "cpu":
            torch.accelerator.synchronize()

    def _derive(self, reloaded: list[nn.Module]) -> None:
        """What other layers keep of the weights: attention's absorbed projections, and a packed output head that shares the embedding."""
        for layer in self._model.modules():
            if is_deferred_attention_layer(layer) and layer not in reloaded:
                layer.process_weights_after_loading(self._model_config.dtype)
        shared = _by_address(self.parameters())
        for name, layer in self._changed().items():
            method = getattr(layer, "quant_method", None)
            weight = getattr(layer, "weight", None)
            if (
                isinstance(method, UnquantizedEmbeddingMethod)
                and weight is not None
                and len(shared.get(_address(weight), ())) > 1
            ):
                log.debug("packing %s again: it shares its weight", name)
                method.process_weights_after_loading(layer)

    def _abandon(self) -> None:
        """The live tensors of layers under reload are put back; what was repacked already stays so."""
        for layer in self._reloading or ():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
        self._reloading = None
        self._restore_kernels()

    def _restore_kernels(self) -> None:
        """Those of layers that were not loaded."""
        for method, kernel in self._kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        self._kernels = []


class _Refusal:
    """Makes every step of a model fail. Graph replays skip its forward, but not its logits."""

    def __init__(self, model: nn.Module, reason: str) -> None:
        def refuse(*_: Any, **__: Any) -> Any:
            raise WeightsBroken(reason)

        self.reason = reason
        self._model = weakref.ref(model)
        self._hook = model.register_forward_pre_hook(refuse)
        if hasattr(model, "compute_logits"):
            model.compute_logits = refuse

    def remove(self) -> None:
        self._hook.remove()
        model = self._model()
        if model is not None:
            vars(model).pop("compute_logits", None)


# Of models whose weights are mixed; a backend that is initialised again has to find them.
_refusals: weakref.WeakKeyDictionary[nn.Module, _Refusal] = weakref.WeakKeyDictionary()


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    named.update(model.named_buffers(remove_duplicate=False))
    return named


def _address(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _by_address(tensors: Mapping[str, torch.Tensor]) -> dict[tuple[Any, ...], list[str]]:
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        found.setdefault(_address(tensor), []).append(name)
    return found


def _serves_as_loaded(layer: nn.Module) -> bool:
    """Whether a write in the layout that the loaders expect is what serves. Shapes are no proof: some kernels permute within them, so
    only methods known to leave the weights alone count."""
    parameters, buffers = layerwise.get_layerwise_info(layer).restore_metadata
    live = {**layer._parameters, **layer._buffers}
    for name, expected in {**parameters, **buffers}.items():
        now = live.get(name)
        if name in SKIP_TENSORS:
            continue
        if now is None or (now.shape, now.dtype, now.stride()) != (expected.shape, expected.dtype, expected.stride()):
            return False
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase) or not (parameters or buffers):
        return True
    if type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        packed = getattr(getattr(layer, "cpu_linear", None), "__closure__", None)  # the packed copy, on CPU
        return not packed and not hasattr(layer, "_cpu_unpacked_conv_weight")
    if type(method) is UnquantizedFusedMoEMethod:
        return method.unquantized_backend in _SAME_LAYOUT
    return type(method).process_weights_after_loading is QuantizeMethodBase.process_weights_after_loading


def _check_whole_layers(changed: Iterable[str], sizes: Mapping[str, int], uncovered: Mapping[str, int]) -> None:
    of_layer: dict[str, list[str]] = {}
    for name in sizes:
        of_layer.setdefault(name.rpartition(".")[0], []).append(name)
    for layer in changed:
        names = of_layer.get(layer, [])
        missing = [name for name in names if uncovered.get(name)]
        if missing and any(uncovered.get(name, 0) < sizes[name] for name in names):
            raise CoverageError(
                f"vLLM repacks {layer} as a whole, and the tensors given leave {', '.join(missing)} unwritten: "
                "refit all of its tensors or none"
            )


@contextlib.contextmanager
def _as_loaded(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """The model's tensors as its loaders expect them, on meta, in place of the live ones; what shares memory live does so too.

    The few that vLLM does not record (biases, expert maps) stay real: a capture reads and never writes them."""
    kept = [
        (layer, dict(vars(layer)), dict(layer._parameters), dict(layer._buffers), set(layer._non_persistent_buffers_set))
        for layer in model.modules()
    ]
    addresses: dict[tuple[Any, ...], torch.Tensor] = {}
    try:
        for layer, _, parameters, buffers, _ in kept:
            restore_layer_on_meta(layer, layerwise.get_layerwise_info(layer))
            for now, before in ((layer._parameters, parameters), (layer._buffers, buffers)):
                for name, tensor in now.items():
                    if tensor is None:
                        continue
                    _unwrap(tensor)
                    live = before.get(name)
                    if live is not None and live.numel() and tensor.is_meta and live.shape == tensor.shape:
                        now[name] = addresses.setdefault(_address(live), tensor)
        yield _named(model)
    finally:
        for layer, attributes, parameters, buffers, transient in kept:
            for name in vars(layer).keys() - attributes.keys():
                del vars(layer)[name]
            vars(layer).update(attributes)
            for now, before in ((layer._parameters, parameters), (layer._buffers, buffers)):
                now.clear()
                now.update(before)
            layer._non_persistent_buffers_set.clear()
            layer._non_persistent_buffers_set.update(transient)


def _unwrap(tensor: torch.Tensor) -> None:
    """A layerwise reload leaves its wrapper on the recorded tensor, and outside of a reload that loads nothing."""
    loader = getattr(tensor, "weight_loader", None)
    if getattr(loader, "__name__", "") == "online_process_loader":
        tensor.weight_loader = layerwise._get_original_loader(tensor)  # type: ignore[attr-defined]
