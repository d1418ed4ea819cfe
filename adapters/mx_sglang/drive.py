"""One update of a running SGLang engine, in one call: whoever trains or operates calls this, and SGLang's own update session does the rest.

    from mx_sglang.drive import refit, refit_server

    refit(engine, "org/model")                                      # an offline sglang.Engine: the newest version
    refit_server("http://127.0.0.1:30000", "org/model", version=7)

Serving goes on until the version is READY, then pauses until it is installed; requests in flight are put back and go on with the new
weights, caches are emptied, and the engine reports `weight_version` from then on. Invariant: when the update fails serving resumes, with
the old version.
"""

from __future__ import annotations

from typing import Any

from mx_common.errors import RefitFailed
from mx_common.refit.drive import Asked, ended_after_failure, post, update_seconds

__all__ = ["refit", "refit_server"]


def refit(engine: Any, model_name: str, version: int | None = None, *, timeout: float | None = None, **settings: Any) -> int:
    """Bring an offline `sglang.Engine` to `version` (None: the newest); returns it. `timeout`: seconds to wait until it is READY;
    `settings`: path, server, only, as `mx_common.refit.drive.Asked`. Raises RefitFailed and SourceLost."""
    from sglang.srt.managers import io_struct

    asked = Asked(model_name, **settings)
    number = asked.ready_version(version, timeout)
    manager, run = engine.tokenizer_manager, engine.loop.run_until_complete
    run(manager.pause_generation(io_struct.PauseGenerationReqInput(mode="retract")))
    try:
        _require(*engine.begin_weight_update())
        with ended_after_failure(engine.end_weight_update):
            request = io_struct.UpdateWeightFromDiskReqInput(**_request(asked, number))
            _require(*run(manager.update_weights_from_disk(request, None)))
        _require(*engine.end_weight_update())
    finally:
        run(manager.continue_generation(io_struct.ContinueGenerationReqInput()))
    return number


def refit_server(
    url: str, model_name: str, version: int | None = None, *, timeout: float | None = None, **settings: Any
) -> int:
    """The same for an SGLang server. The same settings as in the call before keep what the engine has prepared for them."""
    asked = Asked(model_name, **settings)
    number = asked.ready_version(version, timeout)
    post(url, "/pause_generation", {"mode": "retract"})
    try:
        post(url, "/begin_weight_update", {})
        with ended_after_failure(lambda: post(url, "/end_weight_update", {})):
            post(url, "/update_weights_from_disk", _request(asked, number), seconds=update_seconds())
        post(url, "/end_weight_update", {})
    finally:
        post(url, "/continue_generation", {})
    return number


def _request(asked: Asked, number: int) -> dict[str, Any]:
    manifest = {**asked.as_json(), "version": number}
    return {"model_path": asked.model_name, "load_format": "mx", "weight_version": str(number), "manifest": manifest}


def _require(success: bool, message: str, *_: Any) -> None:
    if not success:
        raise RefitFailed(message)
