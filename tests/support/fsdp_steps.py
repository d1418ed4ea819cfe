"""A real FSDP2 trainer that takes an optimizer step for each line `step`, and publishes it.

    python -u -m tests.support.fsdp_steps '{"config": {...}, "model": "toy/refit", "kind": "plain", "folder": FOLDER}'

Prints `published N`; with a `folder`, then `exported FILE`: a checkpoint of the weights as PyTorch gathers them.
`kind`: plain, mixed (bfloat16 in forward), offload (parameters in host memory between steps), each on two ranks, or hsdp, two replicas of
two shards.
"""

from __future__ import annotations

import json
import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from mx_fsdp import MxPublish

WORLD = {"hsdp": 4}


def sharding(kind):
    """What `fully_shard` is given."""
    if kind == "hsdp":
        return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    mesh = {"mesh": init_device_mesh("cpu", (2,))}
    policies = {
        "plain": {},
        "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    }
    return mesh | policies[kind]


def rank_main(rank, world, port, spec, steps):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec["config"]), dtype=torch.float32)
    how = sharding(spec.get("kind", "plain"))
    for layer in model.model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = torch.arange(64).reshape(2, 32)
    with MxPublish(model, spec["model"]) as publish:
        step = 0
        while steps[rank].get():
            step += 1
            model(input_ids=batch, labels=batch).loss.backward()
            publish.before_step()
            optimizer.step()
            optimizer.zero_grad()
            publish.publish(step)
            dist.barrier()
            if rank == 0:
                print("published", step, flush=True)
            if "folder" in spec:
                whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
                if rank == 0:
                    file = f"{spec['folder']}/{spec.get('kind', 'plain')}-{step}.safetensors"
                    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, file, metadata={"format": "pt"})
                    print("exported", file, flush=True)
    dist.destroy_process_group()


def main():
    spec = json.loads(sys.argv[1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    world = WORLD.get(spec.get("kind"), 2)
    steps = [context.SimpleQueue() for _ in range(world)]
    ranks = [context.Process(target=rank_main, args=(rank, world, port, spec, steps)) for rank in range(world)]
    for process in ranks:
        process.start()
    for _ in sys.stdin:
        for queue in steps:
            queue.put(True)
    for queue in steps:
        queue.put(False)
    for process in ranks:
        process.join(20)


if __name__ == "__main__":
    main()
