"""Carries each version of a trainer's weights, whole, into a running engine.

    Publisher("org/model", "rank0", slots).publish(step, held)                  # every trainer rank
    Receiver(RefitJob("org/model", worker_id), engine).update()                 # every rank of an engine
    for name, tensor in receive_full("org/model"): ...                          # whoever installs by himself

An adapter says what a framework holds (`Held`) and what an engine is (`RefitEngine`); everything between is columns of boxes, free of
any framework.

Invariant: a receiver serves one whole version or the one before it, never a mixture.
"""

from mx_common.refit.engine import RefitEngine, RefitJob
from mx_common.refit.full import receive_full
from mx_common.refit.held import Held
from mx_common.refit.publisher import Published, Publisher
from mx_common.refit.receiver import Installed, Ready, Receiver
from mx_common.refit.table import Agent, ShardTable

__all__ = [
    "Agent",
    "Held",
    "Installed",
    "Published",
    "Publisher",
    "Ready",
    "Receiver",
    "RefitEngine",
    "RefitJob",
    "ShardTable",
    "receive_full",
]
