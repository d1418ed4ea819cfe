"""A live PyTorch model as `mx_common.refit` sees it; an adapter says what its engine does to a model after loading it.

    class VllmRefit(TorchRefit):
        def loading(self): ...              # the context in which the engine's loaders run
        def as_loaded(self): ...            # the tensors they expect, on meta
        def repacked(self): ...             # layers that serve from another layout than they are loaded in
        def take_apart(self, layer): ...    # until `repack`, its loaders keep what they are given

A repacked layer goes whole through the engine's loader: all of its tensors, or none. Invariant: a live parameter keeps its address;
`capture` leaves the model exactly as it was, whatever the loader raises.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from mx_common.errors import CoverageError
from mx_common.load.serving import withdraw
from mx_common.refit import live
from mx_common.refit.capture import Capture, capture
from mx_common.refit.engine import TensorFacts

__all__ = ["TorchRefit"]


class TorchRefit:
    """Implements `mx_common.refit.engine.RefitEngine` for one worker."""

    def __init__(self, engine: str, model: nn.Module, device: torch.device, log: logging.Logger) -> None:
        self.engine, self.model, self.device, self.log = engine, model, device, log
        self._pauses = 0
        self._apart: list[nn.Module] | None = None
        self._unlike: set[str] = set()

    def loading(self) -> AbstractContextManager[object]:
        """The context in which the engine's loaders run."""
        return nullcontext()

    def as_loaded(self) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """The tensors that the engine's loaders expect, in the place of the live ones."""
        return live.on_meta(self.model)

    def repacked(self) -> Mapping[str, nn.Module]:
        """Layers that serve from another layout than their loaders write, by name."""
        return {}

    def take_apart(self, layer: nn.Module) -> None:
        """A repacked layer is about to be loaded. Its loaders may keep the tensors that they are given until `repack`."""

    def repack(self) -> None:
        """All tensors were loaded: repack the layers that are apart, in place; those that got none are put back."""

    def put_back(self, layer: nn.Module) -> None:
        """Loading failed: the live tensors of a layer that is apart are in place again. What was repacked already stays so."""

    def derive(self, repacked: list[nn.Module]) -> None:
        """What other layers keep of the weights. `repacked`: those that have it already."""

    def parameters(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers on the serving device, under every name; empty ones (packed away) left out."""
        return live.serving(self.model, self.device)

    def derived(self) -> set[str]:
        """Buffers: what engines compute for themselves they do not keep as parameters."""
        return {name for name, _ in self.model.named_buffers(remove_duplicate=False)}

    def capture(self, tensors: TensorFacts) -> Capture:
        """Raises CoverageError when a repacked layer would get only a part of its tensors."""
        serving, repacked = self.parameters(), self.repacked()
        with self.loading(), self.as_loaded() as expected:
            found = capture(lambda weights: self.model.load_weights(weights), expected, tensors)
            sizes = {name: tensor.nbytes for name, tensor in expected.items()}
        self._unlike |= found.reasons.keys()
        shared = live.by_address(serving)
        whole: dict[str, str] = {}
        for piece in found.pieces:
            param = serving.get(piece.param)
            names = [piece.param] if param is None else shared[live.address(param)]
            if param is None or any(_layer_of(name) in repacked for name in names):
                whole[piece.tensor] = f"{self.engine} serves {piece.param} in another layout than it loads it"
        if not found.failed:
            self._check_whole_layers(repacked, sizes, found.uncovered)
        for name, earlier, later in found.overlaps:
            self.log.warning("%s and %s are the same parameter %s here: the engine serves %s", earlier, later, name, later)
        return found.left_to_loader(whole)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Through the model's own loader: in place, or repacked in place. A layer may come in several calls while `paused` is open."""
        with self.paused(), self.loading(), torch.no_grad():
            if self._apart is None:
                self._apart = []
                for layer in self.repacked().values():
                    self._apart.append(layer)
                    self.take_apart(layer)
            # some loaders keep what they are given, until a layer is complete or for good, and the caller's memory has other uses
            given = ((name, t.clone() if self._apart or name in self._unlike else t) for name, t in tensors)
            self.model.load_weights(given)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A worker runs one call at a time, so nothing is served inside; leaving it repacks and derives what was loaded."""
        if not self._pauses:
            withdraw(self.model, self.log)  # other replicas would read weights whose digests do not hold any more
            self._synchronize()
        self._pauses += 1
        try:
            yield
            if self._pauses == 1:
                self._finish()
        except BaseException:
            for layer in self._apart or ():
                self.put_back(layer)
            self._apart = None
            raise
        finally:
            self._pauses -= 1

    @property
    def serving(self) -> int | None:
        """The version that was installed last, None before the first."""
        return live.served(self.model)

    def installed(self, version: int) -> None:
        """Report this version, and serve again."""
        live.serve(self.model, version)

    @property
    def refused(self) -> str:
        """Why nothing is served, or ""."""
        return live.refusal(self.model)

    def refuse(self, reason: str) -> None:
        """From now on a step fails with WeightsBroken, which ends most engines if one is asked for before a whole version came."""
        live.refuse(self.model, reason)

    def _finish(self) -> None:
        with self.loading(), torch.no_grad():
            if self._apart:
                self.repack()
            repacked, self._apart = self._apart or [], None
            self.derive(repacked)
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _check_whole_layers(self, layers: Iterable[str], sizes: Mapping[str, int], uncovered: Mapping[str, int]) -> None:
        of_layer: dict[str, list[str]] = {}
        for name in sizes:
            of_layer.setdefault(_layer_of(name), []).append(name)
        for layer in layers:
            names = of_layer.get(layer, [])
            missing = [name for name in names if uncovered.get(name)]
            if missing and any(uncovered.get(name, 0) < sizes[name] for name in names):
                raise CoverageError(
                    f"{self.engine} repacks {layer} as a whole, and the tensors given leave {', '.join(missing)} unwritten: "
                    "refit all of its tensors or none"
                )


def _layer_of(name: str) -> str:
    return name.rpartition(".")[0]
