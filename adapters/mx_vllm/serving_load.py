"""How busy a vLLM engine is, for the workers that heartbeat: `max((running + waiting) / max_num_seqs, kv_cache_usage)`.

vLLM instantiates this class in the process that collects statistics (entry point `vllm.stat_logger_plugins`, also with
`--disable-log-stats`) and calls `record` at each step, never while idle. Invariant: inert unless the load format is mx.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from mx_common.load.serving import LoadReport
from mx_common.source_load import ServingLoad
from mx_common.speaking import speak_through

__all__ = ["MxStatLogger", "serving_channel"]


def serving_channel(vllm_config: VllmConfig, engine_index: int | None = None) -> ServingLoad:
    """The channel of one engine: the same in its API server, which knows the index, and in each of its workers."""
    index = vllm_config.parallel_config.data_parallel_index if engine_index is None else engine_index
    return ServingLoad(vllm_config.instance_id.removesuffix(f"_dp{index}"), index)


class MxStatLogger(StatLoggerBase):
    """Keeps the state of the last step; a thread reports it."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._slots = vllm_config.scheduler_config.max_num_seqs
        self._report: LoadReport | None = None
        if vllm_config.load_config.load_format == "mx":
            speak_through("vllm")
            self._report = LoadReport(serving_channel(vllm_config, engine_index))

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        """At the end of a step."""
        if scheduler_stats is not None and self._report is not None:
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._report.observe(scheduler_stats.num_running_reqs, waiting, self._slots, scheduler_stats.kv_cache_usage)

    def log_engine_initialized(self) -> None:
        """The engine can take requests."""
        if self._report is not None:
            self._report.ready = True
            self._report.publish()
