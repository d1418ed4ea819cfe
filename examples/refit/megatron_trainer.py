"""A Megatron TP2 loop that publishes each version: the lines marked below are all that it took.

    RANK=0 WORLD_SIZE=2 ... python -m examples.refit.megatron_trainer CONFIG_FOLDER NAME

The trainer is the tests' (real megatron-core, DDP and distributed optimizer, with their stand-ins for CUDA devices on a CPU machine).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from mx_megatron import MegatronPublisher
from tests.megatron.trainer_child import Trainer, case_of

SIZES = {"hidden": 256, "heads": 8, "groups": 4, "head_dim": 32, "ffn": 512}


def main(folder: Path, name: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    trainer = Trainer(case_of({"tp": world, "sizes": SIZES}, world))
    publisher = MegatronPublisher.create(trainer.chunks, folder / "config.json", model_name=name)  # 1
    publisher.guard(trainer.optimizer)  # 2
    for step, _ in enumerate(sys.stdin, start=1):
        started = time.perf_counter()
        loss = trainer.step()
        trained = time.perf_counter() - started
        published = publisher.publish(step)  # 3
        said = {"version": step, "loss": round(loss, 3), "train_s": round(trained, 3)}
        said |= {"publish_s": round(sum(published.seconds.values()), 4), "held_bytes": published.held_bytes}
        print("DEMO " + json.dumps(said), flush=True)
    publisher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
