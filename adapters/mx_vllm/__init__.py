"""vLLM: `--load-format mx`.

A replica started with it reads its weights out of another replica's memory where one is READY, from storage otherwise, and then serves
others. Installed, it registers itself through vLLM's plugin entry points:

    vllm serve MODEL --load-format mx
    vllm serve MODEL --load-format mx --model-loader-extra-config '{"server": "10.0.0.7:8001", "selector": "balanced"}'

Invariant: with any other load format the pack changes nothing in vLLM.
"""

from __future__ import annotations

from mx_vllm._version import SUPPORTED

__all__ = ["LOAD_FORMAT", "SUPPORTED", "register"]

LOAD_FORMAT = "mx"


def register() -> None:
    """Entry point `vllm.general_plugins`: offer the load format. Called in every process of vLLM, any number of times."""
    from vllm.logger import init_logger
    from vllm.model_executor import model_loader

    from mx_vllm.loader import MxModelLoader

    taken = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {}).get(LOAD_FORMAT)
    if taken is MxModelLoader:
        return
    if taken is not None:
        init_logger("vllm.mx").error(
            "load format %r is already provided by %s.%s; mx-adapters leaves it alone. Uninstall one of the two plugins, or choose "
            "with VLLM_PLUGINS",
            LOAD_FORMAT,
            taken.__module__,
            taken.__qualname__,
        )
        return
    model_loader.register_model_loader(LOAD_FORMAT)(MxModelLoader)
