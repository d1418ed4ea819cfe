"""How the tests run SGLang on a CPU, as a server and as an `Engine`: where it is installed, options, environment, greedy sampling.

Standard library only: both the tests' Python and SGLang's import it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.vllm_model import NEW_TOKENS

__all__ = ["ENVIRONMENTS", "PYTHON", "SAMPLING", "TOTAL_TOKENS", "environment", "options"]

# beside the environment that runs the tests: `make setup-sglang`
ENVIRONMENTS = Path(sys.prefix).parent
PYTHON = ENVIRONMENTS / ".venv-sglang" / "bin" / "python"
SLOTS, TOTAL_TOKENS = 4, 1024
END_TOKEN = 2

# ignore_eos as in transformers' min_new_tokens, which never gives the end token; SGLang's own min_new_tokens needs a tokenizer
SAMPLING = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, "logit_bias": {str(END_TOKEN): -1e9}}


def options(model, *, load_format="mx", tp=1, extra=None, **more):
    """Arguments of `sglang.Engine`; flags of `sglang serve` have the same names."""
    return {
        "model_path": str(model),
        "load_format": load_format,
        "model_loader_extra_config": extra or "{}",
        "tp_size": tp,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "cuda_graph_backend_decode": "disabled",
        "cuda_graph_backend_prefill": "disabled",
        "disable_overlap_schedule": True,
        "sleep_on_idle": True,
        "max_total_tokens": TOTAL_TOKENS,
        "max_running_requests": SLOTS,
        **more,
    }


def environment(tp=1):
    """Variables of its processes. A rank a core: without a list, SGLang looks for as many memory nodes as there are ranks."""
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp)))} if tp > 1 else {}
    return {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", **bind}
