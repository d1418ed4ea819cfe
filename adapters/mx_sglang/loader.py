"""The model loader SGLang instantiates in each scheduler for `--load-format mx`.

It translates SGLang's calls into `mx_common.load`: which sources, how often, what is verified and what follows a failure is decided there.
Invariant: the model that `load_model` returns is whole, and this process serves it to others from then on.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import sglang
import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.model_loader import loader as theirs
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.runtime_context import get_exec, get_model, get_parallel
from sglang.srt.utils import cpu_has_amx_support, is_cpu
from torch import nn

from mx_common.load import Job, Settings
from mx_common.load.serving import EngineReady, load_and_serve
from mx_common.load.sharing import job_of, why_not_shared
from mx_common.load.torch_model import TorchModel
from mx_common.speaking import speak_through
from mx_common.wire import p2p
from mx_sglang import ENGINE, process

__all__ = ["MxModelLoader", "SglangModel", "job_for"]

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class MxModelLoader(theirs.BaseModelLoader):
    """`--load-format mx`. Raises ConfigError for bad settings and UnsupportedVersion for another SGLang, both before anything loads."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        speak_through("sglang")
        ENGINE.check(sglang.__version__)
        self._settings = Settings.resolve(load_config.model_loader_extra_config)

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> nn.Module:
        """Pull the weights or read them from storage, then start serving them."""
        job = job_for(model_config, device_config.device_type, self._settings)
        channel = process.channel_of_this_scheduler()
        ready = EngineReady(channel)
        if not model_config.is_draft_model:
            process.loaded = process.Loaded(channel, ready)
        engine = SglangModel(model_config, device_config, self.load_config, whole=not job.refused)
        return load_and_serve(job, engine, ready=ready, serving=channel, log=process.log)

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch the files the fallback would read."""
        storage_loader(self.load_config, model_config).download_model(model_config)


class SglangModel(TorchModel):
    """One scheduler's model. `whole`: it may be shared; any other is left to SGLang's own loader from beginning to end."""

    def __init__(self, model_config: ModelConfig, device_config: DeviceConfig, load_config: LoadConfig, *, whole: bool) -> None:
        super().__init__("SGLang", torch.device(device_config.device), without="--load-format auto")
        self._model_config, self._device_config = model_config, device_config
        self._load_config, self._whole = load_config, whole

    def create(self, fill: bool) -> nn.Module:
        """As SGLang's default loader does it."""
        storage = storage_loader(self._load_config, self._model_config)
        if not self._whole:
            return storage.load_model(model_config=self._model_config, device_config=self._device_config)
        self.remember(factory._ROPE_DICT)
        with set_default_torch_dtype(self._model_config.dtype):
            with self.device:
                model = theirs._initialize_model(self._model_config, storage.load_config)
            if fill:
                storage.load_weights_only(model, storage._get_all_weights(self._model_config, model), self.device)
            else:
                theirs.post_load_weights(model)  # what a model derives from its weights has to be there to be received
            before = self.processing(model)
            storage.postprocess_weights(model, self.device)
            self.processed(model, before)
        return model


def storage_loader(load_config: LoadConfig, model_config: ModelConfig) -> Any:
    """SGLang's own loader for weights on storage, with this load's other settings."""
    plain = dataclasses.replace(load_config, load_format=LoadFormat.AUTO, model_loader_extra_config={})
    return theirs.get_model_loader(plain, model_config)


def job_for(model_config: ModelConfig, device_type: str, settings: Settings) -> Job:
    """The load of this process's rank."""
    parallel, text = get_parallel(), model_config.hf_text_config
    # a CPU's packed weights keep their shape
    packed = {"packed_for": "amx"} if is_cpu() and cpu_has_amx_support() else {}
    refused = why_not_shared(
        draft=model_config.is_draft_model,
        quantization=str(model_config.quantization or getattr(model_config, "modelopt_quant", None) or ""),
        experts=any(getattr(text, name, 0) for name in _EXPERTS),
        unmapped_by="the memory saver" if get_exec().features.enable_memory_saver else "",
    )
    if get_model().weight_cache_mode != "off":
        refused = refused or "these weights are the weight cache's, for the engines of this host"
    return job_of(
        "sglang",
        p2p.BACKEND_FRAMEWORK_SGLANG,
        sglang.__version__,
        settings,
        model=model_config.model_path,
        revision=model_config.revision,
        dtype=model_config.dtype,
        quantization=model_config.quantization,
        configuration=model_config.hf_config.to_dict(),
        device=device_type,
        rank=parallel.pp_rank * parallel.tp_size + parallel.tp_rank,
        world=parallel.pp_size * parallel.tp_size,
        tensor_parallel=parallel.tp_size,
        pipeline_parallel=parallel.pp_size,
        expert_parallel=parallel.ep_size,
        layout={"attention_tensor_parallel_size": str(parallel.attn_tp_size), **packed},
        refused=refused,
    )
