"""How the demo starts each engine as a server on a CPU machine: the command, the flags that the CPU asks for, and small limits.

    SGLANG.command(model_folder, port)      # ["…/bin/sglang", "serve", MODEL, "--load-format", "mx", …]

The engine's command is the one beside this Python, so the demo of an engine runs in that engine's environment.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ENGINES", "LOAD_FORMAT", "SGLANG", "SLOTS", "VLLM", "Engine"]

SLOTS = 4
LOAD_FORMAT = ("--load-format", "mx")


@dataclass(frozen=True)
class Engine:
    """A server command `NAME serve MODEL …`: `cpu` makes the engine exact and bearable on a CPU, `small` bounds its memory."""

    name: str
    cpu: tuple[str, ...]
    small: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, model: Path | str, port: int, flags: Sequence[str] = LOAD_FORMAT) -> list[str]:
        """Everything to start it with, on loopback."""
        place = ["--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port)]
        program = str(Path(sys.executable).parent / self.name)
        return [program, "serve", str(model), *flags, *place, *self.cpu, *self.small]


VLLM = Engine(
    "vllm",
    # One of the fused CPU kernels of this vLLM build is inexact in bfloat16; plain torch operations give the same tokens as transformers.
    cpu=("--enforce-eager", "--compilation-config", '{"mode": 0, "custom_ops": ["none"]}'),
    small=("--kv-cache-memory-bytes", "256M", "--max-num-seqs", str(SLOTS), "--max-model-len", "1024"),
    environment={"VLLM_NO_USAGE_STATS": "1"},
)

SGLANG = Engine(
    "sglang",
    cpu=(
        *(
            "--device",
            "cpu",
            "--attention-backend",
            "torch_native",
            "--sampling-backend",
            "pytorch",
            "--grammar-backend",
            "none",
        ),
        *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
        # without --sleep-on-idle a scheduler that has nothing to do keeps a core busy
        *("--disable-overlap-schedule", "--sleep-on-idle"),
    ),
    small=("--max-total-tokens", "4096", "--max-running-requests", str(SLOTS), "--context-length", "1024"),
)

ENGINES = {engine.name: engine for engine in (VLLM, SGLANG)}
