"""A real FSDP2 trainer on two forked ranks that takes an optimizer step for each line `step`, and publishes it.

python -u -m tests.support.fsdp_steps '{"config": {...}, "model": "toy/refit"}'
"""

from __future__ import annotations

import json
import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from mx_fsdp import MxPublish


def rank_main(rank, port, spec, steps):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec["config"]), dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
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
    dist.destroy_process_group()


def main():
    spec = json.loads(sys.argv[1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    steps = [context.SimpleQueue() for _ in range(2)]
    ranks = [context.Process(target=rank_main, args=(rank, port, spec, steps)) for rank in range(2)]
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
