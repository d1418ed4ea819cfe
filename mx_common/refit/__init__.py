"""Carries each version of a trainer's weights, whole, into a running engine.

    table = ShardTable.from_held(held, Agent("tp0", "trainer-7", metadata), digests=True)    # every trainer rank
    whole = ShardTable.merged(ShardTable.decode(manifest) for manifest in manifests)         # the receiver
    whole.check()

An adapter says what a framework holds (`Held`); everything after that is columns of boxes, free of any framework.

Invariant: a receiver serves one whole version or the one before it, never a mixture.
"""

from mx_common.refit.held import Held
from mx_common.refit.table import Agent, ShardTable

__all__ = ["Agent", "Held", "ShardTable"]
