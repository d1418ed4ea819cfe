"""vLLM on CPU: keep linear weights as ordinary tensors instead of packing them for a kernel library.

After loading, `dispatch_cpu_unquantized_gemm` packs every linear weight for oneDNN, or for the SGL kernels on CPUs with AMX, and keeps
the packed copy where nobody can see it: the parameter becomes an empty tensor, or (the output head) stays as a copy that is no longer
used. No other replica can read such bytes, and writing the parameter changes nothing. With the two switches off, the same function
takes its ordinary torch path; tokens stay the same.

Upstream: vllm/model_executor/layers/utils.py, `dispatch_cpu_unquantized_gemm`; there is no option for it as of 0.32.
Invariant: changes two switches, only on the CPU platform, before a model is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["PATCH"]


@dataclass(frozen=True)
class _KeepWeights:
    name: str = "vllm-keep-weights"
    module: str = "vllm"
    versions: str = ">=0.32,<0.33"
    reason: str = "linear weights stay readable tensors on CPU (oneDNN and SGL packing off)"
    upstream: str = "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm"

    def obstacle(self) -> str:
        """Only the CPU platform packs; both switches must exist, and AMD's zentorch has none."""
        import torch
        from vllm import _custom_ops
        from vllm.model_executor.layers import utils
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return "not needed: only the CPU platform packs weights"
        if not hasattr(_custom_ops, "_supports_onednn"):
            return "vllm._custom_ops has no _supports_onednn"
        if not hasattr(utils, "check_cpu_sgl_kernel"):
            return "vllm.model_executor.layers.utils has no check_cpu_sgl_kernel"
        if current_platform.is_zen_cpu() and hasattr(torch.ops.zentorch, "zentorch_linear_unary"):
            return "zentorch packs weights and has no switch; uninstall it to share weights"
        return ""

    def apply(self, listener: Callable[[Any], None]) -> None:
        """Turn packing off for models built from now on."""
        from vllm import _custom_ops
        from vllm.model_executor.layers import utils

        _custom_ops._supports_onednn = False
        utils.check_cpu_sgl_kernel = _never


def _never(n: int, k: int, dtype: Any) -> bool:
    """Stands in for `check_cpu_sgl_kernel`: no [n, k] weight is packed."""
    return False


PATCH = _KeepWeights()
