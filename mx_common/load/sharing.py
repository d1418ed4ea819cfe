"""What an adapter says of a model, made into the load of one rank: under which identity it is shared, and whether it may be.

    refused = why_not_shared(quantization="fp8", experts=False)
    job = job_of("vllm", p2p.BACKEND_FRAMEWORK_VLLM, vllm.__version__, settings, rank=0, world=2, tensor_parallel=2, ..., refused=refused)

Invariant: two replicas get the same `mx_source_id` only if their weights are interchangeable tensor by tensor.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import torch

from mx_common.identity import Identity
from mx_common.load.engine import Job, configuration_digest
from mx_common.load.settings import Settings
from mx_common.wire import p2p

__all__ = ["job_of", "why_not_shared"]


def job_of(
    engine: str,
    framework: int,
    version: str,
    settings: Settings,
    *,
    model: str,
    revision: str | None,
    dtype: torch.dtype,
    quantization: str | None,
    configuration: Mapping[str, Any],
    device: str,
    rank: int,
    world: int,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    layout: Mapping[str, str] | None = None,
    refused: str = "",
) -> Job:
    """The load of this process's rank. `framework`: the wire's number of the engine, `version` the engine's own: tensors are published in
    the layout it serves from, which belongs to one version of it and of torch. `model`, `revision`: as the engine was told; the settings go
    over them. `configuration`: Hugging Face's, as it is in force. `layout`: whatever else the layout follows from."""
    identity = Identity(
        mx_source_type=p2p.MX_SOURCE_TYPE_WEIGHTS,
        model_name=settings.model_name or model,
        backend_framework=framework,
        tensor_parallel_size=tensor_parallel,
        pipeline_parallel_size=pipeline_parallel,
        expert_parallel_size=expert_parallel,
        dtype=str(dtype).removeprefix("torch."),
        quantization=quantization or "",
        extra_parameters={"config_digest": configuration_digest(configuration), **(layout or {})},
        revision=settings.revision or revision or "",
        backend_framework_version=version,
        torch_version=torch.__version__,
        gpu_arch=".".join(map(str, torch.cuda.get_device_capability())) if device == "cuda" else "",
    )
    return Job(
        identity=identity,
        worker_id=uuid.uuid4().hex,
        rank=rank,
        world=world,
        engine=engine,
        accelerator=device,
        settings=settings,
        refused=refused,
    )


def why_not_shared(
    *, draft: bool = False, quantization: str = "", experts: bool = False, unmapped_by: str = "", moves_experts: bool = False
) -> str:
    """Why a model's memory may not be shared, or "". `unmapped_by`: what takes weights out of memory while the engine runs."""
    if draft:
        return "a draft model shares layers with its target model after loading"
    if quantization:
        return f"quantisation {quantization} keeps state outside its tensors once processed"
    if experts:
        return "experts are packed for the kernel each replica chooses, and equal shapes may hold other orders"
    if unmapped_by:
        return f"{unmapped_by} unmaps weights while others may read them"
    if moves_experts:
        return "expert load balancing moves experts between ranks while serving"
    return ""
