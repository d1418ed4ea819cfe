"""A process with the real vLLM: what its layers and workers do before and after the patches. Prints one line of facts and waits.

python vllm_child.py
"""

from __future__ import annotations

import json
import logging
import sys

import torch
from vllm import _custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.v1.worker.worker_base import WorkerBase

from mx_common import patching

said = []


class Listening(logging.Handler):
    def emit(self, record):
        said.append([record.levelname, record.getMessage()])


log = logging.getLogger("child")
log.addHandler(Listening())
log.propagate = False
log.setLevel(logging.DEBUG)


class Worker(WorkerBase):
    """A worker of a framework that extends another's."""

    def __init__(self):  # a real worker's needs an engine
        self.fails = False

    def compile_or_warm_up_model(self):
        if self.fails:
            raise RuntimeError("out of memory")
        return "times"


class Extended(Worker):
    def compile_or_warm_up_model(self):
        return [super().compile_or_warm_up_model()]


def layer_facts():
    """One linear layer as vLLM makes and post-processes it."""
    torch.manual_seed(0)
    layer = ReplicatedLinear(64, 32, bias=False, params_dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(32, 64))
    weight, tokens = layer.weight.detach().clone(), torch.randn(3, 64).bfloat16()
    layer.quant_method.process_weights_after_loading(layer)
    before = layer.quant_method.apply(layer, tokens)
    readable = layer.weight.shape == weight.shape and bool(torch.equal(layer.weight, weight))
    written = None
    if readable:
        with torch.no_grad():
            layer.weight.mul_(2)
        written = bool(torch.equal(layer.quant_method.apply(layer, tokens), before * 2))
    return {"readable": readable, "writable": written, "output": before.float().flatten().tolist()}


def obstacle_facts():
    """The precondition does not hold, twice; then it does again."""
    kept = _custom_ops._supports_onednn
    del _custom_ops._supports_onednn
    states = [patching.apply("vllm-keep-weights", log).state for _ in range(3)]
    _custom_ops._supports_onednn = kept
    warnings, said[:] = list(said), []
    return {"states": states, "said": warnings}


def warm_up_facts():
    heard = []

    def listener(worker):
        heard.append(type(worker).__name__)

    def broken(worker):
        raise ValueError("a listener that fails")

    for _ in range(2):
        patching.apply("vllm-warm-up-signal", log, broken)
        patching.apply("vllm-warm-up-signal", log, listener)
    results = [Worker().compile_or_warm_up_model(), Extended().compile_or_warm_up_model()]
    failing = Worker()
    failing.fails = True
    try:
        failing.compile_or_warm_up_model()
    except RuntimeError as error:
        results.append(str(error))
    return {"results": results, "heard": heard}


def main():
    parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{sys.argv[1]}", 0, "gloo")
    facts = {}
    with set_current_vllm_config(VllmConfig()):
        parallel_state.initialize_model_parallel(1, 1)
        facts["plain"] = layer_facts()
        facts["obstacle"] = obstacle_facts()
        facts["applied"] = [patching.apply("vllm-keep-weights", log).state for _ in range(2)]
        facts["switches"] = [_custom_ops._supports_onednn, bool(utils.check_cpu_sgl_kernel(64, 64, torch.bfloat16))]
        facts["patched"] = layer_facts()
    facts["applied_said"] = list(said)
    facts["warm_up"] = warm_up_facts()
    print("facts", json.dumps(facts), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
