"""One update of a running vLLM engine, in one call: whoever trains or operates calls this, and vLLM's own endpoints do the rest.

    from mx_vllm.drive import refit, refit_server

    refit(llm, "org/model")                                        # an offline engine, vllm.LLM: the newest version
    refit_server("http://127.0.0.1:8000", "org/model", version=7)  # a server with VLLM_SERVER_DEV_MODE=1

Serving pauses between the start and the end of writing, requests in flight are kept and go on with the new weights, prefix and KV caches
are emptied, and the engine reports the version from then on. Invariant: when the update fails serving resumes with the old version.
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
from mx_common.errors import RefitFailed, SourceLost

__all__ = ["newest_version", "refit", "refit_server"]

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
    number = newest_version(model_name, server) if version is None else version
    init = {"model_name": model_name, "path": path, "server": server, "only": list(only)}
    if _settings.get(llm) != init:
        llm.init_weight_transfer_engine({"init_info": init})
        _settings[llm] = init
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": number, "timeout": timeout}})
    llm.finish_weight_update(weight_version=str(number))
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
    init: bool = True,
    timeout: float | None = None,
) -> int:
    """Bring a vLLM server to `version` (None: the newest); returns it. `init=False` when an earlier call did it with the same settings.
    `timeout`: seconds a call may take (MX_TRANSFER_TIMEOUT and MX_REFIT_WAIT_SECONDS together unless given). Raises RefitFailed."""
    number = newest_version(model_name, server) if version is None else version
    seconds = timeout or envs.TRANSFER_TIMEOUT.get() + envs.REFIT_WAIT_SECONDS.get()
    if init:
        info = {"model_name": model_name, "path": path, "server": server, "only": list(only)}
        _post(url, "/init_weight_transfer_engine", seconds, {"init_info": info})
    with _paused(url, seconds):
        _post(url, "/start_weight_update", seconds)
        _post(url, "/update_weights", seconds, {"update_info": {"version": number}})
        _post(url, "/finish_weight_update", seconds, {"weight_version": str(number)})
    return number


def newest_version(model_name: str, server: str = "") -> int:
    """The newest READY version of the model, waited for (`MX_REFIT_WAIT_SECONDS`). Raises SourceLost."""
    with RefitClient(resolve(server or None)) as client:
        found = client.latest(model_name)
        if found is None:
            raise SourceLost(
                f"no version of {model_name} is READY in the directory {client.address}; has the trainer published one?"
            )
        return int(found.number)


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
