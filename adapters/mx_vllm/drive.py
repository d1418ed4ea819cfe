"""One update of a running vLLM engine, in one call: whoever trains or operates calls this, and vLLM's own endpoints do the rest.

    from mx_vllm.drive import refit, refit_server

    refit(llm, "org/model")                                        # an offline engine, vllm.LLM: the newest version
    refit_server("http://127.0.0.1:8000", "org/model", version=7)  # a server with VLLM_SERVER_DEV_MODE=1

Serving goes on until the version is READY, then pauses until it is installed; requests in flight are kept and go on with the new weights,
KV, prefix and encoder caches are emptied, and the engine reports the version from then on. When the update fails the old one serves on.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mx_common.refit.drive import Asked, ended_after_failure, post, update_seconds

__all__ = ["refit", "refit_server"]

_post = partial(post, advice=[(404, "vLLM offers it only with VLLM_SERVER_DEV_MODE=1")])


def refit(llm: Any, model_name: str, version: int | None = None, *, timeout: float | None = None, **settings: Any) -> int:
    """Bring an offline `vllm.LLM` to `version` (None: the newest), READY within `timeout` seconds; returns it. `settings`: path, server,
    only of `mx_common.refit.drive.Asked`. Raises what vLLM raises for a failed update, whose text is that of RefitFailed."""
    asked = Asked(model_name, **settings)
    number = asked.ready_version(version, timeout)
    init = partial(llm.init_weight_transfer_engine, {"init_info": asked.as_json()})
    init()
    llm.start_weight_update()
    with ended_after_failure(init, llm.finish_weight_update):  # forgets what any rank prepared, then closes the session
        llm.update_weights({"update_info": {"version": number}})
        llm.finish_weight_update(weight_version=str(number))
    llm.llm_engine.reset_encoder_cache()
    llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    return number


def refit_server(
    url: str, model_name: str, version: int | None = None, *, timeout: float | None = None, **settings: Any
) -> int:
    """The same for a vLLM server. Raises RefitFailed and SourceLost."""
    asked = Asked(model_name, **settings)
    number = asked.ready_version(version, timeout)
    init = partial(_post, url, "/init_weight_transfer_engine", {"init_info": asked.as_json()})
    init()
    _post(url, "/pause?mode=keep")
    try:
        _post(url, "/start_weight_update")
        with ended_after_failure(init, partial(_post, url, "/finish_weight_update", {})):  # as above
            _post(url, "/update_weights", {"update_info": {"version": number}}, seconds=update_seconds())
            _post(url, "/finish_weight_update", {"weight_version": str(number)})
    finally:
        _post(url, "/resume")
    return number
