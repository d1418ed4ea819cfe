"""Hugging Face's own Trainer with accelerate's FSDP2 on two ranks: `python hf_trainer_child.py FOLDER`; each rank leaves FOLDER/RANK.pt.

accelerate takes FSDP for accelerators only, so a subclass says FSDP where it says "several CPUs"; sharding, optimizer and loop are theirs.
The callback is all that is added. What the publisher is told is written down where the publisher would stand.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from forked_ranks import run_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from mx_fsdp.hf_callback import MxPublishCallback

STEPS = 3
calls = []


class Recorder:
    """Stands where the publisher stands. Keeps what each version held, and the addresses."""

    def __init__(self, model_name, slot, expected_slots, **options):
        calls.append(("open", model_name, slot, tuple(expected_slots)))

    def publish(self, version, held):
        parts = [(h.name, h.shape, h.start, h.tensor.clone(), h.tensor.data_ptr()) for h in held]
        calls.append(("publish", version, parts))

    def before_update(self):
        calls.append(("before_update",))
        return True

    def close(self):
        calls.append(("close",))


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
    stand_in = types.ModuleType("mx_common.refit.publisher")
    stand_in.Publisher = Recorder
    sys.modules[stand_in.__name__] = stand_in
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
    trainer = TrainerOnCpus(model, arguments, train_dataset=rows, callbacks=[MxPublishCallback("tiny/llama")])
    trainer.train()
    assert isinstance(trainer.model, FSDPModule)
    full = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True))
    torch.save({"calls": calls, "full": full}, folder / f"{rank}.pt")


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    run_ranks(2, lambda rank: rank_main(rank, Path(sys.argv[1])))
    print("done", flush=True)
