"""What an inference engine implements to receive versions of its weights.

    class VllmRefit:                            # see mx_common.refit.torch_engine, and mx_vllm.refit for a real one
        def parameters(self): ...               # what serves now, by the engine's names
        def capture(self, tensors): ...         # which boxes of the checkpoint's tensors go where
        def load(self, tensors): ...            # full tensors, through the engine's own loader
        def paused(self): ...                   # nothing is served inside
        def installed(self, version): ...       # caches are reset, the version is reported

An adapter translates; planning, reading, verifying and the order of things are `mx_common.refit`'s. Invariant the pack relies on: while
`paused` is open nothing reads the parameters, and their addresses never change.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mx_common import envs
from mx_common.directory.activities import Activity
from mx_common.errors import ConfigError
from mx_common.refit.capture import Capture

if TYPE_CHECKING:
    import torch

__all__ = ["PATHS", "RefitEngine", "RefitJob", "TensorFacts"]

PATHS = ("reshard", "staged")
"""Exact slices into the parameters; full tensors through the engine's loader."""

TensorFacts = Mapping[str, "tuple[tuple[int, ...], torch.dtype]"]
"""Checkpoint name -> global shape and dtype, as the trainer publishes them."""


class RefitEngine(Protocol):
    """One rank's live model."""

    @property
    def serving(self) -> int | None:
        """The version that was installed last, None before the first. Another object for the same model says the same."""

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Every tensor that serving reads, by the engine's name. Storage addresses are stable."""

    def derived(self) -> Collection[str]:
        """Those of `parameters` that a checkpoint need not fill, since the engine makes them itself: rotary tables, scales, caches."""

    def capture(self, tensors: TensorFacts) -> Capture:
        """What the engine's own loader does with these tensors, in terms of the live parameters."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Install full tensors through the engine's own loader, in place."""

    def paused(self) -> AbstractContextManager[None]:
        """Nothing is served while it is open."""

    def installed(self, version: int) -> None:
        """A whole version is in place: forget what was cached of the old one, report this one from now on, and serve again if it had
        to be refused."""

    @property
    def refused(self) -> str:
        """Why it serves nothing, as `refuse` was told; "" when it serves."""

    def refuse(self, reason: str) -> None:
        """The weights are mixed: serve nothing from now on, and say why, until `installed` is called."""


@dataclass(frozen=True)
class RefitJob:
    """Who receives what. `path`: `reshard` or `staged`. `wanted`: which checkpoint tensors to refit (None: all), by name. `server` "" is
    `MX_SERVER_ADDRESS`, else the embedded directory."""

    model_name: str
    worker_id: str
    path: str = "reshard"
    rank: int = 0
    world: int = 1
    engine: str = ""
    framework: str = ""
    server: str = ""
    wanted: Callable[[str], bool] | None = None
    host: str = field(default_factory=socket.gethostname)
    staging_bytes: int = field(default_factory=envs.STAGING_BYTES.get)
    verify: bool = field(default_factory=envs.VERIFY_DIGEST.get)
    shadow: str = field(default_factory=envs.REFIT_SHADOW.get)

    def __post_init__(self) -> None:
        if self.path not in PATHS:
            raise ConfigError(
                f"refit path {self.path!r}: use reshard (exact slices into the parameters) or staged (full tensors)"
            )
        if not self.model_name or not self.worker_id:
            raise ConfigError("a refit needs a model_name, the one the trainer publishes under, and a worker_id")

    def activity(self, version: int | None) -> Activity:
        """The refit to `version` (None: the newest), as it begins."""
        return Activity(
            uuid.uuid4().hex,
            self.worker_id,
            self.model_name,
            self.path,
            self.host,
            self.rank,
            self.world,
            self.engine,
            version,
        )
