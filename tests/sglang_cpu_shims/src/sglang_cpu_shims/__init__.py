"""Stands in for what SGLang's wheel lacks on a machine without accelerator. For tests and the demo, never for users.

Two gaps, one shim each:

- `install`: the torchvision wheel is built against CUDA, so on CPU its compiled operators do not load, and its Python side then fails
  at import, because it describes two operators that nobody declared. Transformers, hence SGLang, imports it. `torchvision_ops`
  declares the two.
- `activate`: SGLang's own CPU platform calls kernels of `sgl_kernel`, of which there is no CPU wheel. `platform` is the same platform
  with plain torch operations instead.

`make setup-sglang` installs this distribution; a `.pth` file calls `install` when Python starts, SGLang finds `activate` through its
entry-point group `sglang.srt.platforms`.

Invariant: a Python process that imports neither torchvision nor SGLang pays nothing; torch is imported by neither function.
"""

from __future__ import annotations

import sys

__all__ = ["activate", "install"]


def install() -> None:
    """Watch for the import of torchvision."""
    from sglang_cpu_shims.torchvision_ops import DeclareOperators

    sys.meta_path.insert(0, DeclareOperators())


def activate() -> str:
    """The platform class, as SGLang asks for it."""
    return "sglang_cpu_shims.platform:CpuWithoutKernels"
