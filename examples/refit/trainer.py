"""The trainer processes of the demo, as the demo sees them: told to take a step, they answer with what they published.

    with Trainer("examples.refit.fsdp_trainer", ranks=2, arguments=[...], environment=env, log_folder=scratch) as trainer:
        published = trainer.step()              # {"version": 1, "loss": 2.3, "seconds": {...}, "held_bytes": ...}

Invariant: ends the processes it started, however the block is left.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.first_light.replica import free_port

__all__ = ["Trainer"]

STEP_SECONDS = 180.0
MARK = "DEMO "


class Trainer:
    """`ranks` processes of one training job on this machine, joined by gloo on loopback."""

    def __init__(
        self, module: str, ranks: int, arguments: Sequence[str], environment: Mapping[str, str], log_folder: Path
    ) -> None:
        self.module, port = module, free_port()
        self._answers: list[queue.Queue[dict[str, Any] | None]] = []
        self._processes = []
        self._logs = [log_folder / f"{module.rsplit('.', 1)[-1]}-{rank}.log" for rank in range(ranks)]
        for rank, path in enumerate(self._logs):
            joined = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            joined |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            with path.open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    env={**os.environ, **environment, **joined},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            self._processes.append(process)
            self._answers.append(queue.Queue())
            threading.Thread(target=self._listen, args=(rank,), daemon=True).start()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()  # the end of the input ends a trainer
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def step(self) -> dict[str, Any]:
        """One optimizer step and what rank 0 published then; bytes are summed over the ranks. Raises RuntimeError with a rank's log."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("step\n")
            process.stdin.flush()
        answers = [self._answer(rank) for rank in range(len(self._processes))]
        return {**answers[0], "held_bytes": sum(answer["held_bytes"] for answer in answers)}

    def _listen(self, rank: int) -> None:
        process = self._processes[rank]
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                self._answers[rank].put(json.loads(line.removeprefix(MARK)))
        self._answers[rank].put(None)

    def _answer(self, rank: int) -> dict[str, Any]:
        try:
            answer = self._answers[rank].get(timeout=STEP_SECONDS)
        except queue.Empty:
            answer = None
        if answer is None:
            tail = "\n".join(self._logs[rank].read_text(errors="replace").splitlines()[-25:])
            raise RuntimeError(f"rank {rank} of {self.module} did not finish its step; {self._logs[rank]}:\n{tail}")
        return answer
