"""What an inference engine implements to load through this pack.

An adapter translates; it holds no retry, no verification and no policy. Three calls are enough:

    class VllmModel:                        # see mx_common.load.torch_model, and mx_vllm.loader for a real one
        def build(self): ...                # a model in its final memory layout, values undefined
        def discard(self): ...              # forget it, memory returned
        def load_from_storage(self): ...    # a model with weights read by the engine's own loader

Invariant the pack relies on: at most one model exists at a time; `build` and `load_from_storage` are called only with none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mx_common.identity import Identity
from mx_common.load.settings import Settings

if TYPE_CHECKING:
    import torch

__all__ = ["EngineModel", "Job", "configuration_digest"]

# where a configuration came from, not what it says
_NOT_OF_THE_MODEL = ("_name_or_path", "_commit_hash", "transformers_version")


class EngineModel(Protocol):
    """One rank's model, as its engine makes it."""

    def build(self) -> Mapping[str, torch.Tensor]:
        """Create the model in the layout it serves in (post-processing included) with undefined values.

        Returns every tensor that serving reads: parameters, buffers and plain tensor attributes, by a name that is the same in
        every replica.
        """

    def discard(self) -> None:
        """Drop the model, or what a `build` that failed left of it, so that its memory can be used again.

        Raises MxError when something still holds it.
        """

    def load_from_storage(self) -> Mapping[str, torch.Tensor]:
        """Create the model and fill it with the engine's own loader. Raises what that loader raises."""


@dataclass(frozen=True)
class Job:
    """One load of one rank. `accelerator` as the wire names it ("cpu", "cuda", …); `refused` says why this model may not be shared
    ("" = it may); `rank` is the rank within the weights' parallel layout, `world` their number."""

    identity: Identity
    worker_id: str
    rank: int
    world: int
    engine: str
    accelerator: str
    settings: Settings
    refused: str = ""


def configuration_digest(described: Mapping[str, Any]) -> str:
    """16 hex digits of a model's Hugging Face configuration as it is in force, overrides included: buffers computed from it (rotary
    tables) are shared too."""
    said = {name: value for name, value in described.items() if name not in _NOT_OF_THE_MODEL}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]
