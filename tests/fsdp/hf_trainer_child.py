"""Hugging Face's own Trainer with accelerate's FSDP2 on two ranks: `python hf_trainer_child.py FOLDER`; each rank leaves FOLDER/RANK.pt.

accelerate takes FSDP for accelerators only, so a subclass says FSDP where it says "several CPUs"; sharding, optimizer and loop are theirs.
The callback is all that is added, and one after it that waits for FOLDER/seen-N when version N is published. What the publisher is told is
written down.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from forked_ranks import run_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import mx_common.refit.publisher
from mx_fsdp.hf_callback import MxPublishCallback

STEPS = 3
calls = []


class Publisher(mx_common.refit.publisher.Publisher):
    """The real one. Keeps what each version held, and the addresses."""

    def __init__(self, model_name, slot, expected_slots, **options):
        calls.append(("open", model_name, slot, tuple(expected_slots)))
        super().__init__(model_name, slot, expected_slots, **options)

    def publish(self, version, held):
        parts = [(h.name, h.shape, h.start, h.tensor.clone(), h.tensor.data_ptr()) for h in held]
        calls.append(("publish", version, parts))
        return super().publish(version, held)

    def before_update(self):
        calls.append(("before_update",))
        return super().before_update()

    def close(self):
        calls.append(("close",))
        super().close()


class Waits(TrainerCallback):
    """After the step's version was published: leaves the trainer's own weights, and goes on when the test has read."""

    def __init__(self, folder):
        self.folder, self.parent = folder, os.getppid()

    def on_step_end(self, args, state, control, model=None, **_):
        weights = full_state(model)
        if state.is_world_process_zero:
            torch.save(weights, self.folder / f"full-{state.global_step}.pt")
            print("published", state.global_step, flush=True)
        while not (self.folder / f"seen-{state.global_step}").exists() and os.getppid() == self.parent:
            time.sleep(0.02)


def full_state(model):
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


class TrainerOnCpus(Trainer):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        assert state.distributed_type == DistributedType.MULTI_CPU
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        self.is_fsdp_enabled = True


def rank_main(rank, folder):
    torch.set_num_threads(1)
    mx_common.refit.publisher.Publisher = Publisher
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=251,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
    )
    rows = [{"input_ids": list(range(at, at + 8)), "labels": list(range(at, at + 8))} for at in range(64)]
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        learning_rate=1e-2,
        dataloader_pin_memory=False,
    )
    callbacks = [MxPublishCallback("tiny/llama"), Waits(folder)]
    trainer = TrainerOnCpus(model, arguments, train_dataset=rows, callbacks=callbacks)
    trainer.train()
    assert isinstance(trainer.model, FSDPModule)
    torch.save({"calls": calls, "full": full_state(trainer.model)}, folder / f"{rank}.pt")


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    run_ranks(2, lambda rank: rank_main(rank, Path(sys.argv[1])))
    print("done", flush=True)
