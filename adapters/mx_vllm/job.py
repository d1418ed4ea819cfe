"""Turns vLLM's configuration into what is loaded: identity, rank, and whether this model may be shared.

Invariant: two replicas get the same `mx_source_id` only if their weights are interchangeable tensor by tensor.
"""

from __future__ import annotations

import hashlib
import json
import uuid

import torch
import vllm
from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform

from mx_common.identity import Identity
from mx_common.load import Job, Settings
from mx_common.wire import p2p

__all__ = ["job_for"]

# where the configuration came from, not what it says
NOT_OF_THE_MODEL = ("_name_or_path", "_commit_hash", "transformers_version")


def job_for(vllm_config: VllmConfig, model_config: ModelConfig, settings: Settings, hidden: str = "") -> Job:
    """The load of this process's rank. `hidden` says why weights of this process may lie where nobody sees them, or ""."""
    parallel = vllm_config.parallel_config
    rank, world = parallel.rank, parallel.world_size
    expert_parallel = 1
    if parallel.enable_expert_parallel:  # experts are spread over data-parallel replicas too: every worker holds other ones
        expert_parallel = parallel.tensor_parallel_size * parallel.data_parallel_size
        rank += parallel.data_parallel_index * world
        world *= parallel.data_parallel_size
    identity = Identity(
        mx_source_type=p2p.MX_SOURCE_TYPE_WEIGHTS,
        model_name=settings.model_name or model_config.model,
        backend_framework=p2p.BACKEND_FRAMEWORK_VLLM,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        expert_parallel_size=expert_parallel,
        dtype=str(model_config.dtype).removeprefix("torch."),
        quantization=model_config.quantization or "",
        extra_parameters={"config_digest": _config_digest(model_config)},
        revision=settings.revision or model_config.revision or "",
        # tensors are published in the layout vLLM serves from, which belongs to one version of it and of torch
        backend_framework_version=vllm.__version__,
        torch_version=torch.__version__,
        gpu_arch=_gpu_arch(),
    )
    return Job(
        identity=identity,
        worker_id=uuid.uuid4().hex,
        rank=rank,
        world=world,
        engine="vllm",
        accelerator=current_platform.device_type,
        settings=settings,
        refused=hidden or _refusal(vllm_config, model_config),
    )


def _refusal(vllm_config: VllmConfig, model_config: ModelConfig) -> str:
    """Why this model's memory may not be shared, or ""."""
    speculative = vllm_config.speculative_config
    if speculative is not None and model_config is speculative.draft_model_config:
        return "a draft model shares layers with its target model after loading"
    if model_config.quantization or vllm_config.quant_config is not None:
        return f"quantisation {model_config.quantization} keeps state outside its tensors once processed"
    if model_config.is_moe:
        return "experts are packed for the kernel each replica chooses, and equal shapes may hold other orders"
    if model_config.enable_sleep_mode:
        return "sleep mode unmaps weights while others may read them"
    if vllm_config.parallel_config.enable_eplb:
        return "expert load balancing moves experts between ranks while serving"
    return ""


def _config_digest(model_config: ModelConfig) -> str:
    """Of the model's configuration as it is in force, overrides included: buffers computed from it (rotary tables) are shared too."""
    described = model_config.hf_config.to_dict()
    for name in NOT_OF_THE_MODEL:
        described.pop(name, None)
    text = json.dumps(described, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _gpu_arch() -> str:
    capability = None if current_platform.is_cpu() else current_platform.get_device_capability()
    return "" if capability is None else capability.as_version_str()
