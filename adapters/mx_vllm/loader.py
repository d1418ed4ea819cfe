"""The model loader vLLM instantiates in each worker for `--load-format mx`, the model it makes, and the identity this is shared under.

It translates vLLM's calls into `mx_common.load`: which sources, how often, what is verified and what follows a failure is decided there.
Invariant: the model that `load_model` returns is whole, and this process serves it to others from then on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import vllm
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from mx_common import patching
from mx_common.load import Job, Settings
from mx_common.load.serving import EngineReady, load_and_serve, withdraw
from mx_common.load.sharing import job_of, why_not_shared
from mx_common.load.torch_model import TorchModel
from mx_common.speaking import speak_through
from mx_common.wire import p2p
from mx_vllm import ENGINE
from mx_vllm.serving_load import serving_channel

__all__ = ["MxModelLoader", "VllmModel", "job_for"]

log = init_logger("vllm.mx")


class MxModelLoader(BaseModelLoader):
    """`--load-format mx`. Raises ConfigError for bad settings and UnsupportedVersion for another vLLM, both before anything loads."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        speak_through("vllm")
        ENGINE.check(vllm.__version__)
        self._settings = Settings.resolve(load_config.model_loader_extra_config)
        self._hidden = ""
        if current_platform.is_cpu():
            outcome = patching.apply("vllm-keep-weights", log)
            if outcome.state != "applied":
                self._hidden = f"vLLM packs weights on CPU, and patch {outcome.name} is {outcome.state}: {outcome.why}"

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """Pull the weights or read them from storage, then start serving them."""
        channel = serving_channel(vllm_config)
        ready = EngineReady(channel)

        def warm(worker: Any) -> None:
            if worker.vllm_config.instance_id == vllm_config.instance_id:  # other engines of this process signal too
                ready.warmed_up()

        job = job_for(vllm_config, model_config, self._settings, self._hidden)
        patching.apply("vllm-warm-up-signal", log, warm)
        engine = VllmModel(vllm_config, model_config, prefix, self.load_config)
        return load_and_serve(job, engine, ready=ready, serving=channel, log=log)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """In-place load into a live model: from storage, as vLLM's default loader does it. It is no source any more."""
        withdraw(model, log)
        _storage_loader(self.load_config).load_weights(model, model_config)

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch the files the fallback would read."""
        _storage_loader(self.load_config).download_model(model_config)

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """For vLLM's `reload_weights`, which overwrites a live model: it is no source any more."""
        withdraw(model, log)
        return _storage_loader(self.load_config).get_all_weights(model_config, model)


class VllmModel(TorchModel):
    """One worker's model. vLLM remembers it in places of its own: layers in its forward context, the rotary cache."""

    def __init__(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str, load_config: LoadConfig) -> None:
        device = torch.device(load_config.device or vllm_config.device_config.device)
        super().__init__("vLLM", device, without="--load-format auto")
        self._vllm_config, self._model_config, self._prefix = vllm_config, model_config, prefix
        self._storage = _storage_loader(load_config)

    def create(self, fill: bool) -> nn.Module:
        """As vLLM's base loader does it."""
        compilation = self._vllm_config.compilation_config
        self.remember(compilation.static_forward_context, compilation.static_all_moe_layers)
        with set_default_torch_dtype(self._model_config.dtype):
            with self.device:
                model = self._storage.create_model(self._vllm_config, self._model_config, self._prefix)
            if fill:
                self._storage.load_weights(model, self._model_config)
            before = self.processing(model)
            process_weights_after_loading(model, self._model_config, self.device)
            self.processed(model, before)
        return model

    def forget(self) -> None:
        """The next model must not inherit half-written buffers from this one."""
        rotary_embedding._ROPE_DICT.clear()


def job_for(vllm_config: VllmConfig, model_config: ModelConfig, settings: Settings, hidden: str = "") -> Job:
    """The load of this process's rank. `hidden` says why weights of this process may lie where nobody sees them, or ""."""
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    rank, world, expert_parallel = parallel.rank, parallel.world_size, 1
    if parallel.enable_expert_parallel:  # experts are spread over data-parallel replicas too: every worker holds other ones
        expert_parallel = parallel.tensor_parallel_size * parallel.data_parallel_size
        rank += parallel.data_parallel_index * world
        world *= parallel.data_parallel_size
    quantized = model_config.quantization or vllm_config.quant_config is not None
    refused = why_not_shared(
        draft=speculative is not None and model_config is speculative.draft_model_config,
        quantization=str(model_config.quantization) if quantized else "",
        experts=model_config.is_moe,
        unmapped_by="sleep mode" if model_config.enable_sleep_mode else "",
        moves_experts=parallel.enable_eplb,
    )
    return job_of(
        "vllm",
        p2p.BACKEND_FRAMEWORK_VLLM,
        vllm.__version__,
        settings,
        model=model_config.model,
        revision=model_config.revision,
        dtype=model_config.dtype,
        quantization=model_config.quantization,
        configuration=model_config.hf_config.to_dict(),
        device=current_platform.device_type,
        rank=rank,
        world=world,
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        expert_parallel=expert_parallel,
        refused=hidden or refused,
    )


def _storage_loader(load_config: LoadConfig) -> DefaultModelLoader:
    """vLLM's own loader for weights on storage, with this load's other settings."""
    plain = copy.copy(load_config)
    plain.load_format = "auto"
    plain.model_loader_extra_config = {}
    return DefaultModelLoader(plain)
