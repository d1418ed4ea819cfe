"""A running SGLang server takes over versions that a trainer publishes, through its own update session.

    POST /pause_generation {"mode": "retract"}, /begin_weight_update {}
    POST /update_weights_from_disk {"model_path": "org/model", "load_format": "mx", "manifest": {"version": 7, "path": "reshard"}}
    POST /end_weight_update {}, /continue_generation {}

`manifest` holds `version` (none: the newest), `timeout` and the settings of `mx_common.refit.drive.Asked`; see `mx_sglang.drive` for the
sequence in one call. Invariant: an update that fails says why and leaves the old version serving, or, where weights are mixed, nothing.
"""

from __future__ import annotations

from typing import Any

import sglang
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput, UpdateWeightFromDiskReqOutput
from sglang.srt.model_executor.model_runner_components.weight_updater import _unsupported_derived_weight_cache_error
from sglang.srt.model_loader.loader import _modules_with_quant_method
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import use_intel_amx_backend
from torch import nn

from mx_common.errors import ConfigError, MxError
from mx_common.refit.drive import Asked, Update
from mx_common.refit.ranks import Ranks, Session, gather_over
from mx_common.refit.torch_engine import TorchRefit
from mx_common.speaking import speak_through
from mx_sglang import ENGINE
from mx_sglang.process import log

__all__ = ["SglangRefit", "update"]

_AS_LOADED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)

# of each manager of this process, by its id; a scheduler has one as long as it lives
_sessions: dict[int, Session] = {}


def update(manager: Any, request: UpdateWeightFromDiskReqInput) -> UpdateWeightFromDiskReqOutput:
    """In the place of SchedulerWeightUpdaterManager.update_weights_from_disk, on every rank."""
    try:
        if manager._session is None:
            raise ConfigError("load format mx belongs between begin_weight_update and end_weight_update; auto reads files")
        said = dict(request.manifest or {})
        asked = Update(said.pop("version", None), said.pop("timeout", None))
        session = _sessions.get(id(manager)) or _sessions.setdefault(id(manager), _session_of(manager))
        session.init(Asked.of(said))
        # what SGLang's flush asks after the update: a version beside the caches of another would be no whole one
        idle = not request.flush_cache or manager.is_fully_idle(ignore_waiting=manager.scheduler._engine_paused)
        session.prepare(asked, "" if idle else "requests are running, so caches could not be flushed: pause with mode retract")
        session.install()
    except Exception as error:  # what a call may ask must not end an engine, nor one rank of several
        message = f"{type(error).__name__}: {error}"
        log.error("no update: %s", message, exc_info=not isinstance(error, MxError))
        return UpdateWeightFromDiskReqOutput(success=False, message=message)
    serving = str(SglangRefit.of(manager).serving)
    manager.record_weight_version_after_update(request.weight_version or serving)
    success, message = manager.flush_cache_after_weight_update(request, True, f"Version {serving} is installed.")
    return UpdateWeightFromDiskReqOutput(success=success, message=message)


def _session_of(manager: Any) -> Session:
    ENGINE.check(sglang.__version__)
    speak_through("sglang")
    rank, world = get_parallel().tp_rank, get_parallel().tp_size

    def ranks(asked: Asked) -> Ranks:
        name = manager.tp_worker.model_runner.model_config.model_path
        gather = gather_over(manager.tp_cpu_group)
        return Ranks.of(asked, name, "sglang", SglangRefit.of(manager), rank, world, gather, log)

    return Session(ranks, log, begin="send an update")


class SglangRefit(TorchRefit):
    """One scheduler's model, written in place. SGLang derives what it derives from the weights when the session ends.

    Raises ConfigError for models that SGLang serves from another layout than it loads them in."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__("SGLang", model, device, log)
        if kept := _unsupported_derived_weight_cache_error(model):
            raise ConfigError(kept)
        methods = _modules_with_quant_method(model)
        packed = {type(m).__name__ for layer, m in methods if type(m) not in _AS_LOADED or use_intel_amx_backend(layer)}
        if packed:
            raise ConfigError(
                f"a refit cannot write layers that SGLang repacks after loading ({', '.join(sorted(packed))}): use a model without "
                "quantisation and experts, or update it from storage"
            )
        if get_parallel().pp_size > 1:
            raise ConfigError("a refit of SGLang with pipeline parallelism is not supported: start it with --pp-size 1")

    @classmethod
    def of(cls, manager: Any) -> SglangRefit:
        """The model that a scheduler's manager updates; a draft model is another one."""
        runner = manager.tp_worker.model_runner
        return cls(runner.model, torch.device(runner.device))
