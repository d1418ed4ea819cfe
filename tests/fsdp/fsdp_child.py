"""Real FSDP2 trainers on loopback: `python fsdp_child.py FOLDER` runs every case on 2 and then on 4 ranks, each rank a process.

Each rank leaves FOLDER/WORLD-RANK.pt: case -> moment -> {"held": [(name, shape, start, tensor, address)], "full": state dict}. The
process group is gloo on the CPU.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from mx_common.errors import ConfigError
from mx_fsdp import MxPublish, held_tensors

VOCABULARY = 251  # a prime: never divides by the number of ranks


class WithFewRows(LlamaForCausalLM):
    """Three rows: on four ranks one holds none of them. Also a buffer that belongs to the checkpoint, and one that does not."""

    def __init__(self, config):
        super().__init__(config)
        self.few = nn.Linear(config.hidden_size, 3)
        self.register_buffer("seen", torch.arange(5, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, input_ids):
        out = super().forward(input_ids, labels=input_ids, output_hidden_states=True)
        return out.loss + self.few(out.hidden_states[-1]).square().mean()


def llama(cls=WithFewRows, tied=False):
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = cls(config)
    if cls is WithFewRows:
        model.few.reset_parameters()
    return model


def sharded(model, mesh, **options):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def tokens():
    torch.manual_seed(100 + dist.get_rank())
    return torch.randint(0, VOCABULARY, (2, 8))


def taken(model, **options):
    return [(h.name, h.shape, h.start, h.tensor.clone(), h.tensor.data_ptr()) for h in held_tensors(model, **options)]


def full(model):
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: tensor.clone() for name, tensor in state.items()}  # what is not sharded would go on changing


def moment(model, **options):
    held = taken(model, **options)
    return {"held": held, "full": full(model)}


def trained(model, steps=2, **options):
    """Moments before training and after each optimizer step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    moments = {"before": moment(model, **options)}
    for step in range(1, steps + 1):
        model(tokens()).backward()
        optimizer.step()
        optimizer.zero_grad()
        moments[f"step{step}"] = moment(model, **options)
    return moments


def plain(mesh):
    return trained(sharded(llama(), mesh))


def mixed(mesh):
    return trained(sharded(llama(), mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)))


def offload(mesh):
    return trained(sharded(llama(), mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)))


def bf16(mesh):
    return trained(sharded(llama().to(torch.bfloat16), mesh))


def ignored(mesh):
    model = llama()
    return trained(fully_shard(model, mesh=mesh, ignored_params={model.model.norm.weight, model.few.weight}), steps=1)


def gathered(mesh):
    """Parameters are gathered in bf16 while a version is taken: between forward and backward, and after an evaluation."""
    model = sharded(llama(), mesh, reshard_after_forward=False, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    model(tokens()).backward()
    optimizer.step()
    optimizer.zero_grad()
    after_step = moment(model)
    loss = model(tokens())
    unsharded = type(model.model.embed_tokens.weight).__name__, model.model.embed_tokens.weight.dtype
    between = taken(model)
    loss.backward()  # what was taken has freed nothing that backward needs
    finite = all(bool(p.grad.to_local().isfinite().all()) for p in model.parameters() if p.grad is not None)
    with torch.no_grad():
        model(tokens())
    after_evaluation = taken(model)
    state = full(model)
    return {
        "after_step": after_step,
        "between": {"held": between, "full": state},
        "after_evaluation": {"held": after_evaluation, "full": state},
        "facts": {"registered": unsharded, "finite": finite},
    }


def wrapped(mesh):
    model = llama(LlamaForCausalLM, tied=True)
    for at, layer in enumerate(model.model.layers):
        model.model.layers[at] = checkpoint_wrapper(layer)
    model.model.layers[1] = torch.compile(model.model.layers[1])
    fully_shard(model, mesh=mesh)
    outer = nn.Module()
    outer.module = torch.compile(model)
    return {
        "inside": {"held": taken(model), "full": {}},
        "outside": {"held": taken(outer), "full": {}},
        "renamed": {"held": taken(model, rename=lambda n: f"policy.{n}" if "layers.0" in n else None), "full": {}},
        "facts": {"plain_names": [n for n, _ in llama(LlamaForCausalLM, tied=True).named_parameters()]},
    }


def refused(mesh):
    """Each error's text."""

    def text(model, **options):
        try:
            held_tensors(model, **options)
        except ConfigError as error:
            return str(error)
        return "nothing was refused"

    with torch.device("meta"):
        meta = fully_shard(nn.Linear(4, 4), mesh=mesh)
    twice = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    other_torch = fully_shard(nn.Linear(4, 4), mesh=mesh)
    del other_torch._get_fsdp_state()._fsdp_param_groups
    strided = nn.Linear(4, 4)
    strided.weight.data = strided.weight.data.t()
    wrapped_tensor = nn.Module()
    wrapped_tensor.weight = nn.Parameter(torch.zeros(2).as_subclass(type("Float8Tensor", (torch.Tensor,), {})))
    return {
        "facts": {
            "meta": text(meta),
            "twice": text(twice, rename=lambda n: n[2:]),
            "other_torch": text(other_torch),
            "strided": text(strided, rank=0),
            "subclass": text(wrapped_tensor, rank=0),
        }
    }


def hsdp(mesh):
    model = sharded(llama(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return {**trained(model), "all": moment(model, replicas=True)}


def tensor_parallel(mesh):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = llama(LlamaForCausalLM)
    column, row = ColwiseParallel(), RowwiseParallel()
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], {"mlp.gate_proj": column, "mlp.up_proj": column, "mlp.down_proj": row})
    parallelize_module(model, mesh["tp"], {"lm_head": ColwiseParallel(use_local_output=False)})
    sharded(model, mesh["dp"])
    placements = str(model.lm_head.weight.placements)
    held = taken(model)
    state = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    return {"before": {"held": held, "full": state}, "facts": {"placements": placements}}


def experts(mesh):
    """Five experts, fused in memory; the truth is what save_pretrained writes."""
    torch.manual_seed(7)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=5,
            num_experts_per_tok=2,
        )
    )
    sharded(model, mesh)
    inside = [name for name, _ in model.named_parameters()]
    held = taken(model)
    state = revert_weight_conversion(model, full(model)) if dist.get_rank() == 0 else full(model)
    return {
        "before": {"held": held, "full": state},
        "as_they_are": {"held": taken(model, rename=lambda name: name), "full": {}},
        "facts": {"inside": inside},
    }


def columns(mesh):
    model = nn.Linear(8, 4, bias=False)
    torch.manual_seed(1)
    nn.init.normal_(model.weight)
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(1))
    return {"before": moment(model)}


class Recorder:
    """Stands where the publisher stands and writes down what it was told."""

    log: ClassVar[list] = []

    def __init__(self, model_name, slot, expected_slots, *, run="", server="", mode="", framework="", outage="raise", log=None):
        self.log.append(("open", model_name, slot, tuple(expected_slots), run, server, mode))

    def publish(self, version, held):
        self.log.append(("publish", version, sum(h.tensor.numel() for h in held)))
        return version

    def before_update(self):
        self.log.append(("before_update",))
        return True

    def close(self):
        self.log.append(("close",))


def loop(mesh):
    stand_in = types.ModuleType("mx_common.refit.publisher")
    stand_in.Publisher, Recorder.log = Recorder, []
    sys.modules[stand_in.__name__] = stand_in
    model = sharded(llama(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with MxPublish(model, "tiny/llama", server="10.0.0.1:1", every=2, mode="snapshot") as mx:
        returned = []
        for step in range(5):
            model(tokens()).backward()
            mx.before_step()
            optimizer.step()
            returned.append(mx.publish(step))
    whole, Recorder.log = Recorder.log, []
    few = fully_shard(nn.Linear(4, 3), mesh=mesh)
    with MxPublish(few, "few") as mx:
        mx.before_step()
        few_returned = mx.publish(1)
    one_cannot = MxPublish(model, "tiny/llama", rename=(lambda name: "same") if dist.get_rank() == 1 else None)
    try:
        one_cannot.publish(1)
    except ConfigError as error:
        returned.append(str(error))
    return {"facts": {"log": whole, "returned": returned, "few_log": Recorder.log, "few_returned": few_returned}}


CASES = {
    2: (plain, mixed, offload, bf16, ignored, gathered, wrapped, refused, columns, experts, loop),
    4: (plain, mixed, offload, hsdp, tensor_parallel, experts, loop),
}


def rank_main(world, rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,))
    torch.save({case.__name__: case(mesh) for case in CASES[world]}, folder / f"{world}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for size in CASES:
        run_ranks(size, lambda rank, size=size: rank_main(size, rank, Path(sys.argv[1])))
    print("done", flush=True)
