"""Megatron: a trainer publishes each version of its weights where they lie, under the names of the Hugging Face checkpoint.

    from mx_megatron import MxPublishCallback                # Megatron-Bridge: callbacks=[MxPublishCallback(...)]
    from mx_megatron import add_mx_arguments, publishing     # Megatron-LM: extra_args_provider, train_step
    from mx_megatron import MegatronPublisher                # a loop of your own: publisher.publish(version)

Invariant: importing it imports neither torch nor Megatron, and no object of Megatron is changed until publishing is asked for.
"""

from __future__ import annotations

from mx_megatron.arguments import add_mx_arguments
from mx_megatron.callback import MxPublishCallback, publishing
from mx_megatron.families import FAMILIES, Layout
from mx_megatron.layout import Part, Ranks, parts_of
from mx_megatron.model import held_tensors, layout_of, ranks_now
from mx_megatron.publisher import MegatronPublisher

__all__ = [
    "FAMILIES",
    "Layout",
    "MegatronPublisher",
    "MxPublishCallback",
    "Part",
    "Ranks",
    "add_mx_arguments",
    "held_tensors",
    "layout_of",
    "parts_of",
    "publishing",
    "ranks_now",
]
