"""What one process of SGLang knows of its engine: the channel it shares with the others, and what was loaded here.

The front end knows whether requests are taken, the first scheduler how many; every scheduler holds memory and heartbeats. They meet in one
channel, named after the front end's process. Invariant: nothing is started before a model is loaded through `--load-format mx`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import psutil

from mx_common.load.serving import EngineReady, LoadReport, front_serves
from mx_common.source_load import ServingLoad

__all__ = ["Loaded", "channel_of_this_scheduler", "front_is_up", "is_mx", "loaded", "log"]

log = logging.getLogger("sglang.mx")


@dataclass
class Loaded:
    """Of a scheduler's process."""

    channel: ServingLoad
    ready: EngineReady
    _report: LoadReport | None = None

    def report(self) -> LoadReport:
        """Begun by the first look at the load, on the rank that has one."""
        if self._report is None:
            from sglang.srt.environ import envs
            from sglang.srt.runtime_context import get_parallel, get_serving

            self._report, serving = LoadReport(self.channel), get_serving()
            # no hook reaches a front end of another node, of uvicorn's workers, of gRPC or Rust: this rank serves once it runs
            elsewhere = get_parallel().node_rank > 0 or serving.tokenizer_worker_num > 1 or serving.smg_grpc_mode
            self._report.ready = bool(elsewhere or envs.SGLANG_RUST_SERVER.get())
        return self._report


loaded: Loaded | None = None


def front_is_up() -> None:
    """In the process that started the engine: requests are taken, by each of its data-parallel engines."""
    from sglang.srt.runtime_context import get_model, get_parallel

    engines = get_parallel().num_dp_ranks if is_mx(get_model().load_format) else 0
    front_serves(_channel(os.getpid(), index) for index in range(engines))


def is_mx(load_format: object) -> bool:
    """SGLang takes load formats in any case."""
    return isinstance(load_format, str) and load_format.lower() == "mx"


def channel_of_this_scheduler() -> ServingLoad:
    """With several data-parallel engines their controller stands between a scheduler and the front end."""
    from sglang.srt.runtime_context import get_parallel

    front = psutil.Process().parents()[1 if get_parallel().num_dp_ranks > 1 else 0]
    return _channel(front.pid, get_parallel().dp_rank or 0)


def _channel(pid: int, dp_rank: int) -> ServingLoad:
    return ServingLoad(f"sglang-{pid}", dp_rank)
