"""vLLM: tell when a worker has finished warming up.

A loader runs long before its engine can serve: profiling, KV cache allocation, compilation and graph capture follow. A source must not
call itself READY until then, and vLLM tells nobody in the worker's process. The patch calls listeners with the worker after its
`compile_or_warm_up_model` returned.

Upstream: vllm/v1/worker/worker_base.py, `WorkerBase.compile_or_warm_up_model`, called last by `EngineCore`; no callback as of 0.32.
Invariant: the method's result and errors pass through unchanged; listeners are called once, when the outermost of nested calls (a worker
class that extends another's) has returned; a listener that raises does not reach the engine.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PATCH"]

log = logging.getLogger(__name__)

METHOD = "compile_or_warm_up_model"


@dataclass(frozen=True)
class _WarmUpSignal:
    name: str = "vllm-warm-up-signal"
    module: str = "vllm"
    versions: str = ">=0.32,<0.33"
    reason: str = "a source becomes READY when its engine can serve"
    upstream: str = "vllm.v1.worker.worker_base.WorkerBase.compile_or_warm_up_model"
    listeners: list[Callable[[Any], None]] = field(default_factory=list, compare=False)
    warming: set[int] = field(default_factory=set, compare=False)

    def obstacle(self) -> str:
        """The method must exist under its name."""
        from vllm.v1.worker.worker_base import WorkerBase

        return "" if hasattr(WorkerBase, METHOD) else f"WorkerBase has no {METHOD}"

    def apply(self, listener: Callable[[Any], None]) -> None:
        """Wrap the method of every worker class that is loaded, once, and take one more listener."""
        from vllm.v1.worker.worker_base import WorkerBase

        if listener not in self.listeners:
            self.listeners.append(listener)
        pending = [WorkerBase]
        while pending:
            cls = pending.pop()
            pending += cls.__subclasses__()
            method = cls.__dict__.get(METHOD)
            if method is not None and not hasattr(method, "_mx_wrapped"):
                setattr(cls, METHOD, self._wrap(method))

    def _wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapped(worker: Any, *args: Any, **kwargs: Any) -> Any:
            if id(worker) in self.warming:
                return method(worker, *args, **kwargs)
            self.warming.add(id(worker))
            try:
                result = method(worker, *args, **kwargs)
            finally:
                self.warming.discard(id(worker))
            for listener in tuple(self.listeners):
                try:
                    listener(worker)
                except Exception:  # the engine's start must not depend on who listens
                    log.exception("a listener of %s failed", self.name)
            return result

        wrapped._mx_wrapped = True  # type: ignore[attr-defined]
        return wrapped


PATCH = _WarmUpSignal()
