"""A real offline vLLM engine in a process of its own, with `--load-format mx`.

    python -u -m tests.support.vllm_engine '{"model": FOLDER, "tp": 1, "extra": {}}'

Prints `tokens [[...], ...]` for the prompts of `vllm_model`, then again for each line `ask`; the line `reload` has vLLM read its
weights anew, `refit {JSON}` takes over a version (arguments of `mx_vllm.drive.refit`) and prints `refitted NUMBER REPORTED`, `update
[JSON, ...]` prepares one payload a rank. Ends with its input. A failure prints `failed MESSAGE`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

from tests.support.vllm_model import NEW_TOKENS, PROMPTS


def main():
    spec = json.loads(sys.argv[1])
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.update(settings)
    if spec.get("tp", 1) == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from mx_vllm.drive import refit

    options = {"distributed_executor_backend": "uni"} if spec.get("tp", 1) == 1 else {"tensor_parallel_size": spec["tp"]}
    try:
        engine = LLM(
            model=spec["model"],
            load_format=spec.get("load_format", "mx"),
            model_loader_extra_config=spec.get("extra", {}),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            compilation_config={"mode": 0, "custom_ops": ["none"]},
            kv_cache_memory_bytes=32 << 20,
            max_num_seqs=4,
            max_model_len=spec.get("max_model_len", 128),
            **options,
            **spec.get("options", {}),
        )
    except Exception as error:
        print("failed", repr(error))
        raise
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in spec.get("prompts", PROMPTS)]
    print("tokens", json.dumps([list(o.outputs[0].token_ids) for o in engine.generate(prompts, greedy, use_tqdm=False)]))
    for line in sys.stdin:
        if line.strip() == "reload":
            engine.collective_rpc("reload_weights")
            print("reloaded")
        if line.startswith("refit "):
            try:
                number = refit(engine, **json.loads(line.removeprefix("refit ")))
                print("refitted", number, engine.get_weight_version())
            except Exception as error:
                print("failed", repr(error))
        if line.startswith("update "):  # one payload a rank
            try:
                engine.start_weight_update()
                engine.update_weights({"update_info": json.loads(line.removeprefix("update "))})
            except Exception as error:
                with contextlib.suppress(Exception):
                    engine.finish_weight_update()
                print("failed", repr(error))
        if line.strip() == "ask":
            print(
                "tokens", json.dumps([list(o.outputs[0].token_ids) for o in engine.generate(prompts, greedy, use_tqdm=False)])
            )


if __name__ == "__main__":
    main()
