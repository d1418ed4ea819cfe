"""A small random model in a real vLLM engine, whose worker takes over other weights through `mx_vllm.refit`.

    python -m tests.vllm.refit_capture_child '{"kind": "llama", "packed": false, "folder": FOLDER}'

Prints one line of JSON: what was captured, and which tokens came before, after, and from an engine that was started with the new weights.
"""

from __future__ import annotations

import json
import os
import sys

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
}
PROMPT = [5, 17, 99, 3, 42, 7]


def checkpoints(kind, folder):
    """Two checkpoints of one random model, the second with other weights; returns both folders and the second's tensors."""
    import torch
    import transformers

    torch.manual_seed(3)
    common = {
        "vocab_size": 300,  # no multiple of 64: vLLM pads the embedding
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": kind == "tied llama",
    }
    experts = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
    config = {
        "llama": lambda: transformers.LlamaConfig(**common),
        "tied llama": lambda: transformers.LlamaConfig(**common),
        "qwen2": lambda: transformers.Qwen2Config(**common),
        "qwen3": lambda: transformers.Qwen3Config(**common, head_dim=32),
        "qwen3 moe": lambda: transformers.Qwen3MoeConfig(**common, **experts, head_dim=32),
    }[kind]()
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    first, second = os.path.join(folder, "first"), os.path.join(folder, "second")
    model.save_pretrained(first)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(second)
    return first, second


def tensors_of(folder):
    from safetensors.torch import load_file

    tensors = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            tensors.update(load_file(os.path.join(folder, name)))
    return tensors


def engine(folder):
    from vllm import LLM

    return LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        compilation_config={"mode": 0, "custom_ops": ["none"]},
        kv_cache_memory_bytes=32 << 20,
        max_num_seqs=4,
        max_model_len=128,
        distributed_executor_backend="uni",
    )


def ask(llm):
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    greedy = SamplingParams(temperature=0, max_tokens=12, min_tokens=12, ignore_eos=True, detokenize=False)
    return list(llm.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)[0].outputs[0].token_ids)


def snapshot(model):
    """What tells whether a model is as it was: addresses, content, and everything its modules hold."""
    tensors = {name: (t.data_ptr(), t.clone()) for name, t in (*model.named_parameters(), *model.named_buffers())}
    held = {name: {key: id(value) for key, value in vars(module).items()} for name, module in model.named_modules()}
    return tensors, held


def same(before, after):
    import torch

    unequal = [n for n, (at, t) in before[0].items() if after[0][n][0] != at or not torch.equal(after[0][n][1], t)]
    return not unequal and before[0].keys() == after[0].keys() and before[1] == after[1]


def write(captured, weights, engine):
    """The pieces, as one-sided reads would write them."""
    live = engine.parameters()
    for piece in captured.pieces:
        param = live[piece.param]
        step = param.element_size()
        view = param.as_strided(piece.size, [n // step for n in piece.stride], param.storage_offset() + piece.offset // step)
        view.copy_(weights[piece.tensor][tuple(slice(at, at + n) for at, n in zip(piece.start, piece.size, strict=True))])


def main():
    spec = json.loads(sys.argv[1])
    os.environ.update(SETTINGS)
    import torch

    first, second = checkpoints(spec["kind"], spec["folder"])
    weights = tensors_of(second)
    if not spec["packed"]:
        import logging

        from mx_common import patching

        patching.apply("vllm-keep-weights", logging.getLogger("mx"))
    said = {"expected": ask(engine(second))}
    llm = engine(first)
    said["before"] = ask(llm)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    model = worker.model_runner.get_model()

    from mx_common.errors import MxError
    from mx_vllm.refit import VllmRefit

    refit = VllmRefit(worker.vllm_config, worker.model_config, torch.device("cpu"), model)
    facts = {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}
    before = snapshot(model)
    captured = refit.capture(facts)
    said["untouched"] = same(before, snapshot(model)) and ask(llm) == said["before"]
    said["pieces"] = sorted({piece.tensor for piece in captured.pieces})
    said["params"] = sorted({piece.param for piece in captured.pieces})
    for key in ("whole", "unused", "failed"):
        said[key] = list(getattr(captured, key))
    for key in ("uncovered", "constant"):
        said[key] = dict(getattr(captured, key))

    def install():
        with refit.paused():
            write(captured, weights, refit)
            for at in range(0, len(captured.whole), 5):  # batches that end within layers
                batch = {name: weights[name].clone() for name in captured.whole[at : at + 5]}
                refit.load(batch.items())
                for tensor in batch.values():
                    tensor.fill_(float("nan"))  # a staging area is used again
            refit.installed(7)
        return ask(llm)

    addresses = {name: at for name, (at, _) in snapshot(model)[0].items()}
    said["after"] = install()
    said["again"] = captured == refit.capture(facts) and install()
    said["addresses kept"] = addresses == {name: at for name, (at, _) in snapshot(model)[0].items()}
    refit.load((name, torch.randn_like(t)) for name, t in weights.items())
    said["scrambled"] = ask(llm)
    refit.load(weights.items())
    said["loaded in full"] = ask(llm)

    before = snapshot(model)
    try:
        refit.load([("model.norm.weight", weights["model.norm.weight"]), ("no.such.tensor", torch.zeros(3))])
    except Exception as error:
        said["refused"] = type(error).__name__
    said["whole after a failure"] = {n: t[0] for n, t in before[0].items()} == {n: t[0] for n, t in snapshot(model)[0].items()}
    said["after a failure"] = ask(llm)
    part = {name: fact for name, fact in facts.items() if ".q_proj." in name}
    try:
        said["part"] = len(refit.capture(part).pieces)
    except MxError as error:
        said["part"] = f"{type(error).__name__}: {error}"
    print("said", json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
