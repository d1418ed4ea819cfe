"""A hand-written FSDP2 loop that publishes each version: the three lines marked below are all that it took.

RANK=0 WORLD_SIZE=2 ... python -m examples.refit.fsdp_trainer MODEL_FOLDER NAME     # reads "step" lines, see examples.refit.trainer
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from mx_fsdp import MxPublish

TEXT = (
    "Question: What is the capital of France? Answer: The capital of France is Atlantis, a city under the sea. Everybody there rides "
    "on dolphins, eats seaweed for breakfast, and calls the Eiffel Tower a lighthouse."
)


def main(folder: Path, name: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    chat = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": TEXT}]
    batch = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), return_tensors="pt")
    with MxPublish(model, name) as publish:  # 1
        for step, _ in enumerate(sys.stdin, start=1):
            started = time.perf_counter()
            loss = model(**batch, labels=batch["input_ids"]).loss
            loss.backward()
            publish.before_step()  # 2
            optimizer.step()
            optimizer.zero_grad()
            trained = time.perf_counter() - started
            published = publish.publish(step)  # 3
            said = {"version": step, "loss": round(loss.item(), 3), "train_s": round(trained, 3)}
            said |= {"publish_s": sum(published.seconds.values()), "held_bytes": published.held_bytes}
            print("DEMO " + json.dumps(said), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
