"""SGLang's CPU platform as an out-of-tree one, which takes the pure torch implementation of every fused operator.

The in-tree CPU platform prefers `forward_cpu`, compiled in `sgl_kernel`, of which no CPU wheel exists. An out-of-tree platform names
its own dispatch key: "native" leads to `forward_native` everywhere.
"""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities


class CpuWithoutKernels(CpuSRTPlatform):
    """Everything of the CPU platform but its kernels and its graphs."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_dispatch_key_name(self) -> str:
        """Selects `forward_native`."""
        return "native"
