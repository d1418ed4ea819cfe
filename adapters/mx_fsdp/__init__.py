"""Trainers under torch FSDP2 (`fully_shard`): publish each version of the weights where the shards lie.

A hand-written loop:

    from mx_fsdp import MxPublish

    with MxPublish(model, "org/model") as mx:
        for step in range(1, steps + 1):
            loss(model, batch).backward()
            mx.before_step()
            optimizer.step()
            mx.publish(step)

Hugging Face's Trainer takes `mx_fsdp.hf_callback.MxPublishCallback("org/model")`; verl takes the checkpoint engine of
`mx_fsdp.verl_engine`. Invariant: no weight is gathered, cast or copied to be published, unless a snapshot is asked for.
"""

from __future__ import annotations

from mx_fsdp.layout import held_tensors
from mx_fsdp.publish import MxPublish

__all__ = ["MxPublish", "held_tensors"]
