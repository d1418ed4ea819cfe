"""What lets megatron-core run without a GPU: answers "cpu" where it asks for a CUDA device.

Only devices, the random number tracker and two optional kernels (Transformer Engine's, grouped_gemm's) are redirected; models,
parameters, layouts and collectives are Megatron's own.
"""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode


class CudaMeansCpu(TorchFunctionMode):
    """Tensors that are made or moved on "cuda" are on the host."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if function in (torch.Tensor.cuda, torch.nn.Module.cuda):
            return args[0]
        if (
            function is torch.Tensor.type and len(args) == 1 and not kwargs
        ):  # optimizers insist on the names of CUDA's tensor types
            return function(*args).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


class GroupedMatmul:
    """grouped_gemm's `gmm`, as a loop."""

    @staticmethod
    def gmm(a, b, batch_sizes, trans_b=False):
        chunks = torch.split(a, batch_sizes.tolist())
        return torch.cat([chunk @ (w.T if trans_b else w) for chunk, w in zip(chunks, b, strict=True)])


def install():
    """For the rest of this process. Returns the mode, entered."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import experts, grouped_gemm_util, moe_utils

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    moe_utils.te_general_gemm = None
    grouped_gemm_util.grouped_gemm, grouped_gemm_util.ops = GroupedMatmul, GroupedMatmul
    experts.gg = grouped_gemm_util
    mode = CudaMeansCpu()
    mode.__enter__()
    return mode
