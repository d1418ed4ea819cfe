"""One update of a running vLLM engine, in one call: whoever trains or operates calls this, and vLLM's own endpoints do the rest.

    from mx_vllm.drive import refit, refit_server

    refit(llm, "org/model")                                        # an offline engine, vllm.LLM: the newest version
    refit_server("http://127.0.0.1:8000", "org/model", version=7)  # a server with VLLM_SERVER_DEV_MODE=1

Serving goes on until the version is READY, then pauses until it is installed; requests in flight are kept and go on with the new weights,
prefix and KV caches are emptied, and the engine reports the version from then on. Invariant: when the update fails serving resumes, with
the old version.
"""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from mx_common import envs
from mx_common.directory.embedded import resolve
from mx_common.directory.refit_client import RefitClient
from mx_common.errors import RefitFailed

__all__ = ["ready_version", "refit", "refit_server"]

# what each engine was last initialised with
_settings: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def refit(
    llm: Any,
    model_name: str,
    version: int | None = None,
    *,
    path: str = "reshard",
    server: str = "",
    only: Sequence[str] = (),
    timeout: float | None = None,
) -> int:
    """Bring an offline `vllm.LLM` to `version` (None: the newest); returns it. `timeout`: seconds to wait until it is READY. Raises what
    vLLM raises for a failed update, whose text is that of RefitFailed."""
    number = ready_version(model_name, version, server, timeout)
    init = {"model_name": model_name, "path": path, "server": server, "only": list(only)}
    if _settings.get(llm) != init:
        llm.init_weight_transfer_engine({"init_info": init})
        _settings[llm] = init
    llm.start_weight_update()
    try:
        llm.update_weights({"update_info": {"version": number}})
        llm.finish_weight_update(weight_version=str(number))
    except Exception:
        # ends the session on the ranks that still have it open; nothing more is installed
        with contextlib.suppress(Exception):
            llm.finish_weight_update()
        raise
    llm.reset_prefix_cache()
    return number


def refit_server(
    url: str,
    model_name: str,
    version: int | None = None,
    *,
    path: str = "reshard",
    server: str = "",
    only: Sequence[str] = (),
    timeout: float | None = None,
) -> int:
    """Bring a vLLM server to `version` (None: the newest), waited for `timeout` seconds (`MX_REFIT_WAIT_SECONDS`) while it goes on serving;
    returns it. The same settings as in the call before keep what the engine has prepared for them. Raises RefitFailed and SourceLost."""
    number = ready_version(model_name, version, server, timeout)
    seconds = envs.TRANSFER_TIMEOUT.get() + envs.RPC_TIMEOUT.get()
    init = {"model_name": model_name, "path": path, "server": server, "only": list(only)}
    _post(url, "/init_weight_transfer_engine", seconds, {"init_info": init})
    with _paused(url, seconds):
        _post(url, "/start_weight_update", seconds)
        try:
            _post(url, "/update_weights", seconds, {"update_info": {"version": number}})
            _post(url, "/finish_weight_update", seconds, {"weight_version": str(number)})
        except RefitFailed:
            with contextlib.suppress(RefitFailed):  # as above
                _post(url, "/finish_weight_update", seconds, {})
            raise
    return number


def ready_version(model_name: str, version: int | None = None, server: str = "", timeout: float | None = None) -> int:
    """`version` (None: the newest) once it is READY. Raises SourceLost after `timeout` seconds (`MX_REFIT_WAIT_SECONDS`), saying why."""
    seconds = envs.REFIT_WAIT_SECONDS.get() if timeout is None else timeout
    with RefitClient(resolve(server or None)) as client:
        return client.wait_for(model_name, version, seconds).number


@contextlib.contextmanager
def _paused(url: str, seconds: float) -> Iterator[None]:
    _post(url, "/pause?mode=keep", seconds)
    try:
        yield
    finally:
        _post(url, "/resume", seconds)


def _post(url: str, path: str, seconds: float, body: dict[str, Any] | None = None) -> None:
    data = json.dumps(body).encode() if body is not None else b""
    request = urllib.request.Request(
        url.rstrip("/") + path, data=data, method="POST", headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:2000]
        hint = "; vLLM offers it only with VLLM_SERVER_DEV_MODE=1" if error.code == 404 else ""
        raise RefitFailed(f"{url}{path} answered {error.code}: {said}{hint}") from error
    except OSError as error:
        raise RefitFailed(f"{url}{path} did not answer within {seconds:g} s: {error}") from error
