"""A real Megatron model in any parallel layout that publishes version after version: before each, forward, backward and an optimizer step
change every weight.

    python -u -m tests.support.megatron_versions \
        '{"case": {...}, "model": "toy/refit", "versions": 2, "folder": FOLDER, "prompts": [[...], ...], "tokens": 12}'

`case`: arguments of `tests.megatron.cases.case`. Prints `published N` and `generates [[...], ...]`, what Megatron's own forward pass puts
after each prompt, and goes on when FOLDER/seenN exists.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from tests.megatron.cases import case
from tests.megatron.megatron_child import forked, generated
from tests.megatron.trainer_child import Trainer


def rank_main(spec, folder, rank):
    from mx_megatron import MegatronPublisher

    torch.set_num_threads(1)
    parent = os.getppid()
    mine = case(**spec["case"])
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=mine["world"])
    trainer = Trainer(mine)
    publisher = MegatronPublisher.create(trainer.chunks, folder / "config.json", model_name=spec["model"])
    publisher.guard(trainer.optimizer)
    for version in range(1, spec["versions"] + 1):
        before = trainer.parameters()
        trainer.step()
        after = trainer.parameters()
        assert not [name for name in before if np.array_equal(before[name], after[name])]
        publisher.publish(version)
        said = generated(trainer.chunks, mine, spec["prompts"], spec["tokens"])
        dist.barrier()
        if rank == 0:
            print("published", version, flush=True)
            print("generates", json.dumps(said), flush=True)
        while not (folder / f"seen{version}").exists():
            if os.getppid() != parent:
                return  # the test is over
            time.sleep(0.02)
    publisher.close()


def main():
    import megatron.core.models.gpt  # once, before the ranks are forked
    import megatron.core.optimizer  # noqa: F401

    spec = json.loads(sys.argv[1])
    folder = Path(spec["folder"])
    (folder / "config.json").write_text(json.dumps(case(**spec["case"])["hf"]))
    print("done" if forked(lambda rank: rank_main(spec, folder, rank), spec["case"]["world"], folder) else "failed", flush=True)


if __name__ == "__main__":
    main()
