"""What the plugin does where SGLang calls it: in the front end, in each scheduler, before weights are written.

Every process of SGLang imports it: what needs SGLang itself is imported when it is called. Invariant: where the load format is not mx, of a
model or of an update, every hook lets SGLang do as it would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mx_common.load.serving import withdraw
from mx_common.refit.live import refusal
from mx_sglang import process

__all__ = ["check", "engine_up", "keep_name", "name_loader", "observe", "refit", "server_up", "warmed_up", "withdraw_first"]


def name_loader(original: Callable[..., None], load_config: Any) -> None:
    """Around `LoadConfig._verify_load_format`: SGLang takes a class for a load format and instantiates it."""
    if process.is_mx(load_config.load_format):
        from mx_sglang.loader import MxModelLoader

        load_config.load_format = MxModelLoader
    original(load_config)


def server_up(result: Any, *_: Any, **__: Any) -> None:
    """After the HTTP server's warm-up, in the front end."""
    from sglang.srt.entrypoints.http_server import _global_state
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    if _global_state.tokenizer_manager.server_status == ServerStatus.Up:
        process.front_is_up()


def engine_up(result: Any) -> None:
    """After `Engine._ensure_event_loop`, the last thing its construction does; a plugin is loaded too late to hook that itself."""
    process.front_is_up()


def warmed_up(scheduler: Any) -> None:
    """Before the event loop: this rank can take steps."""
    if process.loaded is not None:
        process.loaded.ready.warmed_up()


def observe(writer: Any, snapshot: Any) -> None:
    """Before a snapshot of the scheduler's load is written, on its first rank, several times a second; a thread reports the last one."""
    if process.loaded is not None:
        requests = snapshot.num_running_reqs, snapshot.num_waiting_reqs, snapshot.max_running_requests
        process.loaded.report().observe(*requests, snapshot.token_usage)


def refit(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around an update "from disk": with the load format `mx` it comes from a trainer's memory."""
    if not process.is_mx(request.load_format):
        return original(manager, request)
    from mx_sglang.refit import update

    return update(manager, request)


def keep_name(original: Callable[..., None], manager: Any, model_path: str, load_format: str) -> None:
    """Around `TokenizerManager._update_model_path_info`, in the front end: a version of a trainer is the same model."""
    if not process.is_mx(load_format):
        original(manager, model_path, load_format)


def withdraw_first(updater: Any, *_: Any, **__: Any) -> None:
    """Before SGLang writes to a live model by another way: it is no source any more."""
    if process.loaded is not None:
        withdraw(updater.get_model(), process.log)


def check(runner: Any, *_: Any, **__: Any) -> None:
    """Before a step, which may replay a graph and skip the model: mixed weights serve nothing."""
    if refusal(runner.model):
        runner.model.forward()  # says why
