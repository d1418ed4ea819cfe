"""A small engine of its own that receives versions: fused and sliced parameters, a loader in the manner of the real ones.

It stands in for an inference engine where the test is about versions, plans and faults; the real engines have tests of their own. Its
checkpoint is `checkpoint(seed)`; rank `rank` of `world` keeps a tensor-parallel part of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from mx_common.refit.capture import Capture, capture
from mx_common.refit.engine import TensorFacts

# a process of a test that needs more bytes asks for them before it imports this
SCALE = int(os.environ.get("TOY_REFIT_SCALE", "1"))
HIDDEN, FFN, VOCAB, LAYERS = 64 * SCALE, 192 * SCALE, 96 * SCALE, 2


def checkpoint(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """A version of the weights, by checkpoint name."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tensors = {"embed": made(VOCAB, HIDDEN), "norm": made(HIDDEN)}
    for n in range(LAYERS):
        for name in ("q", "k", "v"):
            tensors[f"layers.{n}.{name}"] = made(HIDDEN, HIDDEN)
        tensors[f"layers.{n}.o"] = made(HIDDEN, HIDDEN)
        tensors[f"layers.{n}.gate"], tensors[f"layers.{n}.up"] = made(FFN, HIDDEN), made(FFN, HIDDEN)
        tensors[f"layers.{n}.down"] = made(HIDDEN, FFN)
    return tensors


class ToyEngine:
    """Implements `mx_common.refit.engine.RefitEngine`."""

    def __init__(self, rank: int = 0, world: int = 1, *, dtype: torch.dtype = torch.bfloat16, lost: str = "") -> None:
        self.rank, self.world, self.lost = rank, world, lost
        self.serving: int | None = None
        self.refused = ""
        self.captures = 0
        h, f = HIDDEN // world, FFN // world
        shapes = {"embed": (VOCAB, HIDDEN), "norm": (HIDDEN,), "rotary": (8, 8)}
        for n in range(LAYERS):
            shapes |= {f"layers.{n}.qkv": (3 * h, HIDDEN), f"layers.{n}.o": (HIDDEN, h)}
            shapes |= {f"layers.{n}.gate_up": (2 * f, HIDDEN), f"layers.{n}.down": (HIDDEN, f)}
        self._params = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self._params

    def derived(self) -> tuple[str, ...]:
        return ("rotary",)

    def capture(self, tensors: TensorFacts) -> Capture:
        self.captures += 1
        twin = {name: torch.empty_like(p, device="meta") for name, p in self._params.items()}
        return capture(lambda stream: self._load(twin, stream), twin, tensors)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name == self.lost:
                raise RuntimeError(f"the toy loader fails on {name}")
            self._load(self._params, [(name, tensor)])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        yield

    def installed(self, version: int) -> None:
        self.serving, self.refused = version, ""

    def refuse(self, reason: str) -> None:
        self.refused = reason

    def _load(self, params: Mapping[str, torch.Tensor], stream: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As engines do it: slice the checkpoint's tensor for this rank, copy it into its place of a fused parameter."""
        for name, loaded in stream:
            layer, _, leaf = name.rpartition(".")
            if leaf in ("q", "k", "v"):
                part = loaded.chunk(self.world, 0)[self.rank]
                at = "qkv".index(leaf) * part.shape[0]
                params[f"{layer}.qkv"].data.narrow(0, at, part.shape[0]).copy_(part)
            elif leaf in ("gate", "up"):
                part = loaded.chunk(self.world, 0)[self.rank]
                at = ("gate", "up").index(leaf) * part.shape[0]
                params[f"{layer}.gate_up"].data.narrow(0, at, part.shape[0]).copy_(part)
            elif leaf in ("o", "down"):
                params[name].data.copy_(loaded.chunk(self.world, 1)[self.rank])
            elif name in params:
                params[name].data.copy_(loaded)


def expected(seed: int, rank: int = 0, world: int = 1, dtype: torch.dtype = torch.bfloat16, source: torch.dtype | None = None):
    """What an engine holds after it loaded `checkpoint(seed)` with its own loader."""
    engine = ToyEngine(rank, world, dtype=dtype)
    engine.load(checkpoint(seed, source or dtype).items())
    return engine.parameters()


def holds(engine: ToyEngine, seed: int, dtype: torch.dtype = torch.bfloat16, source: torch.dtype | None = None) -> bool:
    """Whether `engine` has exactly what its own loader would have made of the version."""
    wanted = expected(seed, engine.rank, engine.world, dtype, source)
    return all(torch.equal(engine.parameters()[name], tensor) for name, tensor in wanted.items())


def matching(columns: str) -> Callable[[str], bool]:
    """Accepts names whose last part is one of `columns`, as `o|down`."""
    return lambda name: name.rpartition(".")[2] in columns.split("|")
