"""What a trainer's rank holds: boxes of global tensors, each as a dense local tensor.

    Held("model.layers.0.self_attn.q_proj.weight", shape=(2048, 1024), start=(1024, 0), tensor=local)    # rows [1024, 2048)

An adapter describes its framework's parameters with these, under the names of the Hugging Face checkpoint, and knows nothing of how they
travel. Invariant: the box lies inside the global tensor, and its bytes lie in memory one after the other, rows first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mx_common.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["Held"]


@dataclass(frozen=True, eq=False)
class Held:
    """`name`: in the Hugging Face checkpoint. `shape`: of the whole tensor. `start`: where the box begins, per dim; it is as large as
    `tensor`, whose memory is published where it lies. Raises ConfigError for a box outside the tensor and for gaps in memory."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        size = tuple(self.tensor.shape)
        if not self.name:
            raise ConfigError("a held tensor without a name; give the one it has in the Hugging Face checkpoint")
        if not len(self.shape) == len(self.start) == len(size):
            raise ConfigError(
                f"{self.name}: shape {self.shape}, start {self.start} and the local shape {size} have different ranks"
            )
        if any(not 0 <= at <= at + n <= whole for at, n, whole in zip(self.start, size, self.shape, strict=True)):
            raise ConfigError(f"{self.name}: a box of {size} at {self.start} does not lie inside the global shape {self.shape}")
        if not self.tensor.is_contiguous():
            strides = tuple(self.tensor.stride())
            raise ConfigError(f"{self.name}: local memory with strides {strides} has gaps; publish its dense parts one by one")
