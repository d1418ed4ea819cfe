"""vLLM's weight-transfer backend `mx`: a running engine takes over versions that a trainer publishes.

    vllm serve MODEL --weight-transfer-config '{"backend": "mx"}'

One update is vLLM's own sequence, over HTTP (`VLLM_SERVER_DEV_MODE=1`) or in Python: init once, then start, update, finish. `update`
prepares a version on every rank, and `finish` writes it; a rank that cannot prepare makes vLLM skip `finish` on all of them. See
`mx_vllm.drive` for the sequence in one call.

vLLM records, when it builds a model, the tensors that its loaders expect. A capture runs the model's own loader on those, on meta, in the
live modules; a second model would collide with the first in vLLM's registries, and its expert maps would be on meta too. Layers that vLLM
repacks after loading serve from another layout: their tensors go whole through vLLM's layerwise reload, which repacks them in place.

Invariant: between `update` and `finish` the weights that serve are untouched, unless MX_REFIT_SHADOW or the staging bound left no room.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import vllm
from torch import nn
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine
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
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors

from mx_common.errors import ConfigError
from mx_common.refit.drive import Asked, Update
from mx_common.refit.live import address, by_address, on_meta, same_layout
from mx_common.refit.ranks import Ranks, Session, gather_over
from mx_common.refit.torch_engine import TorchRefit
from mx_common.speaking import speak_through
from mx_vllm import ENGINE

__all__ = ["MxWeightTransfer", "VllmRefit"]

log = init_logger("vllm.mx")

_AS_LOADED = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels for experts that read the weights as they were loaded. The others swap or pack them, some under the same shape."""


class MxWeightTransfer(WeightTransferEngine[Asked, Update]):  # type: ignore[type-var]  # vLLM fills the two from JSON, no more
    """One worker's end. Raises UnsupportedVersion for another vLLM, when the engine starts."""

    init_info_cls = Asked
    update_info_cls = Update
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        speak_through("vllm")
        ENGINE.check(vllm.__version__)
        super().__init__(config, vllm_config, device, model)
        last = self.parallel_config.rank == self.parallel_config.world_size - 1
        # the last rank speaks for all: of several errors vLLM 0.32 reads the first, and takes the rest for answers to its next calls
        self._session = Session(self._ranks, log, begin="call init_weight_transfer_engine once, before updates", speaks=last)

    def init_transfer_engine(self, init_info: Asked) -> None:
        """Once, and again to change a setting, or to forget what was prepared."""
        self._session.init(init_info)

    def start_weight_update(self) -> None:
        """What an update that was never finished prepared is forgotten."""
        self._session.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """vLLM's entry; its own version synchronises an accelerator, which a CPU does not have and an install does."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        """Prepare a version on this rank. When a rank cannot, or has another version than the others, none of them installs: vLLM leaves
        the session of those that raise nothing open until `finish_weight_update`."""
        self._session.prepare(update_info)

    def finish_weight_update(self) -> None:
        """Install what was prepared. When a rank fails half-way its weights are mixed, it serves nothing, and the last rank raises
        WeightsBroken; call it once more then, which only ends vLLM's session."""
        self._session.install()

    def shutdown(self) -> None:
        self._session.close()

    def _ranks(self, asked: Asked) -> Ranks:
        rank, world = self.parallel_config.rank, self.parallel_config.world_size
        engine = VllmRefit(self.vllm_config, self.model_config, self.device, self.model)
        gather = gather_over(get_world_group().cpu_group)
        return Ranks.of(asked, self.model_config.model, "vllm", engine, rank, world, gather, log)


class VllmRefit(TorchRefit):
    """One worker's model. Raises ConfigError where experts move while serving (EPLB): a captured place would be another expert's later."""

    def __init__(self, vllm_config: VllmConfig, model_config: ModelConfig, device: torch.device, model: nn.Module) -> None:
        if vllm_config.parallel_config.enable_eplb:
            raise ConfigError("a refit cannot follow experts that vLLM moves between ranks: start vLLM without --enable-eplb")
        super().__init__("vLLM", model, device, log)
        self._vllm_config, self._model_config = vllm_config, model_config
        self._kernels: dict[nn.Module, Any] = {}

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        with set_current_vllm_config(self._vllm_config), disable_mtp_completeness_check():
            yield

    def as_loaded(self) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """As vLLM recorded them. The few that it does not record (biases, expert maps) stay real."""
        return on_meta(self.model, _restore)

    def repacked(self) -> dict[str, nn.Module]:
        return {name: layer for name, layer in self.model.named_modules() if not _serves_as_loaded(layer)}

    def take_apart(self, layer: nn.Module) -> None:
        """vLLM's `initialize_layerwise_reload`, of one layer: those that serve as loaded are written in place."""
        info = layerwise.get_layerwise_info(layer)
        info.kernel_tensors = get_layer_params_buffers(layer)
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
        restore_layer_on_meta(layer, info)
        layerwise.initialize_online_processing(layer)
        method = getattr(layer, "quant_method", None)
        if type(method) is UnquantizedFusedMoEMethod and method.unquantized_backend is UnquantizedMoeBackend.CPU:
            # 0.32 packs experts for the CPU only when their kernel is made; a reload would serve them unpacked
            self._kernels[layer] = method.moe_kernel
            method.moe_kernel = None

    def repack(self) -> None:
        finalize_layerwise_reload(self.model, self._model_config)
        for layer in tuple(self._kernels):
            self._restore_kernel(layer)

    def put_back(self, layer: nn.Module) -> None:
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
        self._restore_kernel(layer)

    def derive(self, repacked: list[nn.Module]) -> None:
        """Attention's absorbed projections, and a packed output head that shares the embedding."""
        for layer in self.model.modules():
            if is_deferred_attention_layer(layer) and layer not in repacked:
                layer.process_weights_after_loading(self._model_config.dtype)
        shared = by_address(self.parameters())
        for name, layer in self.repacked().items():
            method, weight = getattr(layer, "quant_method", None), getattr(layer, "weight", None)
            if (
                isinstance(method, UnquantizedEmbeddingMethod)
                and weight is not None
                and len(shared.get(address(weight), ())) > 1
            ):
                log.debug("packing %s again: it shares its weight", name)
                method.process_weights_after_loading(layer)

    def _restore_kernel(self, layer: nn.Module) -> None:
        """That of experts which were not loaded."""
        kernel = self._kernels.pop(layer, None)
        if kernel is not None and layer.quant_method.moe_kernel is None:
            layer.quant_method.moe_kernel = kernel


def _restore(layer: nn.Module) -> None:
    restore_layer_on_meta(layer, layerwise.get_layerwise_info(layer))
    for tensor in get_layer_tensors(layer).values():
        # a layerwise reload leaves its wrapper on the recorded tensor, and outside of a reload that loads nothing
        if getattr(getattr(tensor, "weight_loader", None), "__name__", "") == "online_process_loader":
            tensor.weight_loader = layerwise._get_original_loader(tensor)  # type: ignore[attr-defined]


def _serves_as_loaded(layer: nn.Module) -> bool:
    """Whether a write in the layout that the loaders expect is what serves. Shapes are no proof: some kernels permute within them, so
    only methods known to leave the weights alone count."""
    parameters, buffers = layerwise.get_layerwise_info(layer).restore_metadata
    recorded = {**parameters, **buffers}
    if not same_layout(layer, {name: tensor for name, tensor in recorded.items() if name not in SKIP_TENSORS}):
        return False
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase) or not recorded:
        return True
    if type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        packed = getattr(getattr(layer, "cpu_linear", None), "__closure__", None)  # the packed copy, on CPU
        return not packed and not hasattr(layer, "_cpu_unpacked_conv_weight")
    if type(method) is UnquantizedFusedMoEMethod:
        return method.unquantized_backend in _AS_LOADED
    return type(method).process_weights_after_loading is QuantizeMethodBase.process_weights_after_loading
