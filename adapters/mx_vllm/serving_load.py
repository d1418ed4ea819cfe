"""How busy a vLLM engine is, for the workers that heartbeat.

vLLM instantiates this class in the process that collects statistics (entry point `vllm.stat_logger_plugins`, also with
`--disable-log-stats`) and calls `record` at each step, never while idle; a thread of its own publishes the last state every
second, so that an idle engine reports a measured 0. When the process ends it says for its workers, which vLLM kills, that they
are STALE. Invariant: inert unless the load format is mx; never raises into vLLM.
"""

from __future__ import annotations

import contextlib
import threading
from multiprocessing import util
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from mx_common.load import lives
from mx_common.source_load import serving_load
from mx_vllm._logging import speak_through_vllm
from mx_vllm.ready import serving_channel

__all__ = ["MxStatLogger"]

log = init_logger("vllm.mx")

PERIOD_SECONDS = 1.0


class MxStatLogger(StatLoggerBase):
    """Publishes `max((running + waiting) / max_num_seqs, kv_cache_usage)` of one engine."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._enabled = vllm_config.load_config.load_format == "mx"
        self._slots = vllm_config.scheduler_config.max_num_seqs
        self._load = 0.0
        self._ready = False
        self._stop = threading.Event()
        if self._enabled:
            speak_through_vllm()
            self._channel = serving_channel(vllm_config, engine_index)
            util.Finalize(None, self._farewell, exitpriority=10)
            threading.Thread(target=self._publish_forever, name="mx-serving-load", daemon=True).start()

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        """Keep the state of the step that just ended."""
        if scheduler_stats is not None:
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._load = serving_load(scheduler_stats.num_running_reqs, waiting, self._slots, scheduler_stats.kv_cache_usage)

    def log_engine_initialized(self) -> None:
        """The engine can take requests."""
        self._ready = True
        self._publish()

    def _farewell(self) -> None:
        self._stop.set()
        self._channel.close()
        lives.retire(self._channel.instance)

    def _publish_forever(self) -> None:
        while not self._stop.wait(PERIOD_SECONDS):
            self._publish()

    def _publish(self) -> None:
        if self._enabled:
            with contextlib.suppress(OSError):  # telemetry: a full disk is no reading, not a fault of the engine
                self._channel.publish(self._load, self._ready)
