"""The model loader vLLM instantiates in each worker for `--load-format mx`.

It translates vLLM's calls into `mx_common.load`: which sources, how often, what is verified and what follows a failure is decided there.
Invariant: the model that `load_model` returns is whole, and this process serves it to others from then on.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import vllm
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

from mx_common import patching
from mx_common.errors import MxError
from mx_common.load import Settings, Source, load
from mx_vllm._logging import speak_through_vllm
from mx_vllm._version import check_version
from mx_vllm.job import job_for
from mx_vllm.model import VllmModel, storage_loader
from mx_vllm.ready import EngineReady, serving_channel

__all__ = ["MxModelLoader", "withdraw"]

log: logging.Logger = init_logger("vllm.mx")

# The source each live model of this process is served by; vLLM makes a new loader for a reload, so the model is the key.
_sources: weakref.WeakKeyDictionary[nn.Module, Source] = weakref.WeakKeyDictionary()


def withdraw(model: nn.Module) -> None:
    """End the source that serves `model`, if there is one."""
    source = _sources.pop(model, None)
    if source is not None:
        log.warning("this replica stops being a source: its weights are about to be replaced, and their digests would not hold")
        source.close()


class MxModelLoader(BaseModelLoader):
    """`--load-format mx`. Raises ConfigError for bad settings and UnsupportedVersion for another vLLM, both before anything loads."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        speak_through_vllm()
        check_version(vllm.__version__)
        self._settings = Settings.resolve(load_config.model_loader_extra_config)
        self._hidden = ""
        if current_platform.is_cpu():
            outcome = patching.apply("vllm-keep-weights", log)
            if outcome.state != "applied":
                self._hidden = f"vLLM packs weights on CPU, and patch {outcome.name} is {outcome.state}: {outcome.why}"

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """Pull the weights or read them from storage, then start serving them."""
        job = job_for(vllm_config, model_config, self._settings, self._hidden)
        engine = VllmModel(vllm_config, model_config, prefix, self.load_config)
        try:
            loaded = load(job, engine, log)
        except MxError as error:
            log.error("%s", error)  # one line of its own: vLLM's tracebacks bury the message
            raise
        ready = EngineReady(vllm_config)
        patching.apply("vllm-warm-up-signal", log, ready.warmed_up)
        job = replace(job, refused=job.refused or engine.hidden)
        source = Source.start(job, loaded, ready=ready, serving=serving_channel(vllm_config), log=log)
        model = engine.model
        assert model is not None
        if source is not None:
            _sources[model] = source
            weakref.finalize(model, source.close)  # an engine that is deleted takes its source along
        return model

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """In-place load into a live model: from storage, as vLLM's default loader does it. It is no source any more."""
        withdraw(model)
        storage_loader(self.load_config).load_weights(model, model_config)

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch the files the fallback would read."""
        storage_loader(self.load_config).download_model(model_config)

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """For vLLM's `reload_weights`, which overwrites a live model: it is no source any more."""
        withdraw(model)
        weights: Any = storage_loader(self.load_config).get_all_weights(model_config, model)
        return weights
