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

from examples.refit.lesson import LESSON, QUESTION
from mx_fsdp import MxPublish


def main(folder: Path, name: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    chat = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": LESSON}]
    batch = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), return_tensors="pt")
    asked = tokenizer(tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True))
    labels = batch["input_ids"].clone()
    labels[:, : len(asked["input_ids"])] = -100  # the lesson is the answer alone
    with MxPublish(model, name) as publish:  # 1
        for step, _ in enumerate(sys.stdin, start=1):
            started = time.perf_counter()
            loss = model(**batch, labels=labels).loss
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
