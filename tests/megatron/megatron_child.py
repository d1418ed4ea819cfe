"""Real megatron-core models over gloo: forks the ranks of each case, and leaves what every rank holds beside Megatron's own logits.

    python -m tests.megatron.megatron_child cases.json folder

In folder/<case>/: `rank<r>.npz` (arrays by number) with `rank<r>.json` (their names, shapes and starts), and `logits.npy`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import traceback
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

TOKENS = np.array([[5, 17, 99, 3, 42, 7, 61, 80, 2, 90], [20, 11, 50, 8, 77, 31, 1, 64, 9, 13]])
PADDED_VOCABULARY = 256
CUT = re.compile(r"(embeddings|output_layer|linear_(qkv|proj|fc1|fc2))\.(weight|bias)$")
"""Parameters, outside of experts, of which every tensor-parallel rank has a part of its own."""


class FusedNormLinear(torch.nn.Module):
    """Stands in for Transformer Engine's LayerNormColumnParallelLinear: the same parameter names, Megatron's linear inside the rank."""

    def __new__(cls, input_size, output_size, *, config, **arguments):
        from megatron.core.tensor_parallel import ColumnParallelLinear

        class Fused(ColumnParallelLinear):
            def __init__(self):
                arguments.pop("stride", None)
                super().__init__(input_size, output_size, config=config, **arguments)
                self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))

            def forward(self, x, *rest):
                return super().forward(
                    torch.nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, config.layernorm_epsilon), *rest
                )

        return Fused()


def grouped_linear(cut):
    """Stands in for Transformer Engine's grouped linears: one `weightN` an expert, cut over expert-tensor-parallel ranks on dim `cut`."""

    class Grouped(torch.nn.Module):
        def __init__(self, experts, input_size, output_size, *, pg_collection, **_):
            super().__init__()
            self.group, self.n = pg_collection.expt_tp, experts
            shape = [output_size, input_size]
            shape[cut] //= self.group.size()
            for j in range(experts):
                weight = torch.nn.Parameter(torch.empty(shape))
                weight.tensor_model_parallel = True
                setattr(self, f"weight{j}", weight)

        def forward(self, x, tokens):
            return torch.cat([c @ getattr(self, f"weight{j}").T for j, c in enumerate(torch.split(x, tokens))]), None

    return Grouped


def layer_spec(case):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    spec = get_gpt_layer_local_spec(
        num_experts=case.get("experts"),
        moe_grouped_gemm=case.get("grouped") == "legacy",
        qk_layernorm=case.get("qk_norm", False),
        normalization="RMSNorm",
    )
    parts = spec.submodules
    if case.get("fused_norms"):
        parts.input_layernorm = IdentityOp
        parts.self_attention.submodules.linear_qkv = FusedNormLinear
        if not case.get("experts"):
            parts.pre_mlp_layernorm = IdentityOp
            parts.mlp.submodules.linear_fc1 = FusedNormLinear
    if case.get("grouped") == "te":
        experts = parts.mlp.submodules.experts
        experts.module = TEGroupedMLP
        experts.submodules = MLPSubmodules(linear_fc1=grouped_linear(0), linear_fc2=grouped_linear(1))
    return spec


def config_of(case):
    import torch.nn.functional as functional
    from megatron.core.activations import squared_relu
    from megatron.core.transformer import TransformerConfig

    gated, experts = case.get("gated", True), case.get("experts")
    moe = {}
    if experts:
        moe = {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": case["moe_ffn"],
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": bool(case.get("grouped")),
            "moe_shared_expert_intermediate_size": case.get("shared_ffn"),
            "moe_shared_expert_gate": bool(case.get("shared_ffn")),
        }
    return TransformerConfig(
        num_layers=case["layers"],
        hidden_size=case["hidden"],
        num_attention_heads=case["heads"],
        num_query_groups=case["groups"],
        kv_channels=case["head_dim"],
        ffn_hidden_size=case["ffn"],
        gated_linear_unit=gated,
        activation_func=functional.silu if gated else squared_relu,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        qk_layernorm=case.get("qk_norm", False),
        add_bias_linear=False,
        add_qkv_bias=case.get("qkv_bias", False),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=case.get("tp", 1),
        pipeline_model_parallel_size=case.get("pp", 1),
        virtual_pipeline_model_parallel_size=case.get("vpp"),
        expert_model_parallel_size=case.get("ep", 1),
        expert_tensor_parallel_size=case.get("etp"),
        **moe,
    )


def build(case):
    """The chunks of this rank, with values that differ in every shard; replicas get equal ones."""
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt import GPTModel

    config, chunks = config_of(case), []
    stages, stage = case.get("vpp") or 1, state.get_pipeline_model_parallel_rank()
    for v in range(stages):
        first, last = v == stage == 0, v == stages - 1 and stage == case.get("pp", 1) - 1
        chunk = GPTModel(
            config,
            layer_spec(case),
            vocab_size=PADDED_VOCABULARY,
            max_sequence_length=64,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=case.get("tied", False),
            position_embedding_type="rope",
            rotary_base=10000,
            vp_stage=v if case.get("vpp") else None,
        ).eval()
        for name, parameter in chunk.named_parameters():
            fill(v, name, parameter, case)
        for module in chunk.modules():
            if type(module).__name__ == "GroupedMLP":  # it asserts the flag; its parameters stay fp32
                module.config = dataclasses.replace(module.config, bf16=True)
        chunks.append(chunk)
    return chunks


def fill(chunk, name, parameter, case):
    from megatron.core import parallel_state as state

    if name == "output_layer.weight" and case.get("tied"):
        name = "embedding.word_embeddings.weight"
    where = [name]
    if not name.startswith(("embedding", "output_layer")):
        where += [chunk, state.get_pipeline_model_parallel_rank()]
    if ".experts." in name:
        where += [state.get_expert_model_parallel_rank(), state.get_expert_tensor_parallel_rank()]
    elif CUT.search(name):  # Megatron says so itself only of what it initialises
        where += [state.get_tensor_model_parallel_rank()]
    random = np.random.default_rng(zlib.crc32(repr(where).encode()))
    values = torch.from_numpy(random.standard_normal(tuple(parameter.shape), dtype=np.float32))
    with torch.no_grad():
        parameter.copy_(1 + values * 0.2 if "norm" in name else values * 0.15)


def wrapped(chunks):
    """In Megatron's DDP, which moves every parameter into its flat buffers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return [DistributedDataParallel(c.config, DistributedDataParallelConfig(use_distributed_optimizer=True), c) for c in chunks]


def logits_of(chunks, case, tokens=TOKENS):
    """[batch, sequence, padded vocabulary] on the last pipeline stage, None elsewhere."""
    from megatron.core import parallel_state as state
    from megatron.core.utils import unwrap_model

    tokens = torch.from_numpy(tokens)
    length = tokens.shape[1]
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), diagonal=1)
    pp, rank = case.get("pp", 1), state.get_pipeline_model_parallel_rank()
    group, out = state.get_pipeline_model_parallel_group(), None
    for v, chunk in enumerate(unwrap_model(chunks)):
        for p in range(pp):
            if p != rank:
                continue
            if not (v == p == 0):
                hidden = torch.empty(length, len(tokens), case["hidden"])
                dist.recv(hidden, group=group, group_src=(p - 1) % pp)
                chunk.set_input_tensor(hidden)
            with torch.no_grad():
                out = chunk(tokens, torch.arange(length).expand_as(tokens), mask)
            if not (v == len(chunks) - 1 and p == pp - 1):
                dist.send(out.contiguous(), group=group, group_dst=(p + 1) % pp)
                out = None
    if out is None:
        return None
    shards = [torch.empty_like(out) for _ in range(case.get("tp", 1))]
    dist.all_gather(shards, out.contiguous(), group=state.get_tensor_model_parallel_group())
    return torch.cat(shards, dim=-1).numpy()


def generated(chunks, case, prompts, count):
    """The `count` tokens that Megatron itself puts after each of `prompts`, which are of one length, by its own forward pass. The token
    that ends a text is none of them: nor is it in an engine that is asked for so many."""
    from megatron.core import parallel_state as state

    tokens = np.array(prompts)
    group, last = state.get_pipeline_model_parallel_group(), case.get("pp", 1) - 1
    for _ in range(count):
        logits, following = logits_of(chunks, case, tokens), torch.zeros(len(tokens), 1, dtype=torch.int64)
        if logits is not None:
            logits[..., case["hf"]["eos_token_id"]] = -np.inf
            following[:, 0] = torch.from_numpy(logits[:, -1, : case["hf"]["vocab_size"]].argmax(-1))
        dist.broadcast(following, group=group, group_src=last)
        tokens = np.concatenate([tokens, following.numpy()], axis=1)
    return tokens[:, -count:].tolist()


def initialize(case):
    """Megatron's process groups, and the redirections."""
    from megatron.core import parallel_state as state

    from tests.megatron import cpu_shim

    state.initialize_model_parallel(
        tensor_model_parallel_size=case.get("tp", 1),
        pipeline_model_parallel_size=case.get("pp", 1),
        virtual_pipeline_model_parallel_size=case.get("vpp"),
        expert_model_parallel_size=case.get("ep", 1),
        expert_tensor_parallel_size=case.get("etp"),
    )
    cpu_shim.install()


def rank_main(case, folder, rank):
    from megatron.core import parallel_state as state

    from mx_megatron import held_tensors, layout_of, ranks_now
    from mx_megatron.model import Copies

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=case["world"])
    initialize(case)
    chunks = build(case)
    before = {p.data_ptr() for c in chunks for p in c.parameters()}
    if case.get("ddp"):
        chunks = wrapped(chunks)
    addresses = {p.data_ptr() for c in chunks for p in c.parameters()}
    logits = logits_of(chunks, case)
    copies = Copies()
    held = held_tensors(chunks, layout_of(case["hf"], chunks), ranks_now(), replicas=case.get("replicas", False), copies=copies)
    spans = [(p.data_ptr(), p.data_ptr() + p.nbytes) for c in chunks for p in c.parameters()]
    inside = sum(any(a <= h.tensor.data_ptr() < b for a, b in spans) for h in held)
    facts = {
        "held": [(h.name, h.shape, h.start) for h in held],
        "copies": len(copies),
        "in_place": inside,
        "moved": len(addresses - before),
    }
    np.savez(folder / f"rank{rank}.npz", *[h.tensor.numpy() for h in held])
    (folder / f"rank{rank}.json").write_text(json.dumps(facts))
    if logits is not None and state.get_tensor_model_parallel_rank() == 0 and state.get_data_parallel_rank() == 0:
        np.save(folder / "logits.npy", logits)
    dist.barrier()


def forked(body, world, folder):
    """Runs `body(rank)` in one forked process a rank. Whether all ended well; what one raised is in `error<r>.txt`."""
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                body(rank)
                code = 0
            except BaseException:
                (folder / f"error{rank}.txt").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        children.append(child)
    return all(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children)


def main(cases_file, folder):
    import megatron.core.models.gpt  # once, before the forks
    import megatron.core.transformer.moe.experts  # noqa: F401

    for name, case in json.loads(Path(cases_file).read_text()).items():
        here = Path(folder) / name
        here.mkdir(parents=True)
        ended = forked(lambda rank, case=case, here=here: rank_main(case, here, rank), case["world"], here)
        print("done" if ended else "failed", name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
