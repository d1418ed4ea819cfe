"""When a worker's engine can serve, and where its load is to be read.

Three processes know a part: the worker holds the memory, the engine core warms it up, the API server has the queue. The worker learns of
the second through the patch `vllm-warm-up-signal`, of the third through the host-local channel `mx_vllm.serving_load` writes.
Invariant: READY needs the engine warmed up, and its API server initialised and alive where there is one.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from vllm.config import VllmConfig

from mx_common.source_load import ServingLoad

__all__ = ["EngineReady", "serving_channel"]

# An offline LLM(...) has no API server; a served one reports within this time after warm-up, or is found READY without it.
NO_SERVER_SECONDS = 10.0


def serving_channel(vllm_config: VllmConfig, engine_index: int | None = None) -> ServingLoad:
    """The channel of one engine: the same in its API server, which knows the index, and in each of its workers."""
    index = vllm_config.parallel_config.data_parallel_index if engine_index is None else engine_index
    return ServingLoad(vllm_config.instance_id.removesuffix(f"_dp{index}"), index)


class EngineReady:
    """Callable: can the engine serve?"""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._instance = vllm_config.instance_id
        self._channel = serving_channel(vllm_config)
        self._warm = threading.Event()
        self._warm_since = 0.0
        self._served = False

    def warmed_up(self, worker: Any) -> None:
        """Listener of the patch; other engines of this process signal too."""
        if worker.vllm_config.instance_id == self._instance:
            self._warm_since = time.monotonic()
            self._warm.set()

    def __call__(self) -> bool:
        reading = self._channel.read()
        if reading is not None and reading.ready:
            self._served = True
            return True
        if self._served:  # the API server has ended: an engine without one answers nobody, even if its processes live on
            return False
        return self._warm.is_set() and reading is None and time.monotonic() - self._warm_since > NO_SERVER_SECONDS
