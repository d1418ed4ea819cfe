"""A real FSDP2 trainer on two ranks that publishes for real: `python fsdp_refit_child.py FOLDER VERSIONS`.

Before it publishes version N, rank 0 leaves the full state dict in FOLDER/full-N.pt; it goes on when FOLDER/go-N exists.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from fsdp_child import full, llama, sharded, tokens
from torch.distributed.device_mesh import init_device_mesh

from mx_fsdp import MxPublish


def rank_main(rank, folder, versions):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = sharded(llama(), init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with MxPublish(model, "tiny/llama") as mx:
        for step in range(1, versions + 1):
            model(tokens()).backward()
            mx.before_step()
            optimizer.step()
            optimizer.zero_grad()
            state = full(model)
            if rank == 0:
                torch.save(state, folder / f"full-{step}.pt")
            published = mx.publish(step)
            print(f"published {step} {rank} {published.held_bytes}", flush=True)
            while not (folder / f"go-{step}").exists():
                time.sleep(0.02)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_ranks(2, lambda rank: rank_main(rank, Path(sys.argv[1]), int(sys.argv[2])))
    print("done", flush=True)
