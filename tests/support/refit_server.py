"""A server of any engine that follows a trainer while it is asked, and what it does when a version does not come.

    a_server_follows(server, trainer, config, refit_server)

`server`: a `HttpServer` with `tokens(prompts)` and `weight_version()`; `refit_server`: the call of the engine's adapter.
"""

from __future__ import annotations

import signal
import threading

import pytest

from mx_common.errors import RefitFailed, SourceLost
from tests.support.refit_engines import MODEL, PROMPTS, step

__all__ = ["Asking", "a_server_follows"]


def a_server_follows(server, trainer, config, refit_server, between=lambda: None):
    """Three versions, one that nobody publishes, and one whose trainer is gone. `between`: more that is to leave version 3 serving."""
    with Asking(server) as asking:
        for version, path in ((1, "reshard"), (2, "staged"), (3, "reshard")):
            expected = step(trainer, config, version)
            assert refit_server(server.url, MODEL, version, path=path) == version
            assert server.tokens(PROMPTS) == expected
            assert server.tokens(PROMPTS) == expected, "from a cache of the new weights"
    assert asking.failures == []
    assert asking.answers > 0
    assert server.weight_version() == "3"

    with pytest.raises(SourceLost, match="no version 9 of toy/refit"):
        refit_server(server.url, MODEL, 9, timeout=0.5)
    between()
    assert server.tokens(PROMPTS) == expected

    trainer.tell("step")
    trainer.expect("published", 120)
    trainer.signal(signal.SIGKILL)  # the version stays READY in the directory, and nobody has it
    for _ in range(2):  # the first one leaves nothing open
        with pytest.raises(RefitFailed, match="version 3 still serves"):
            refit_server(server.url, MODEL, 4)
    assert server.tokens(PROMPTS) == expected
    assert server.weight_version() == "3"


class Asking:
    """Somebody asks a server all the time."""

    def __init__(self, server):
        self.server, self.answers, self.failures = server, 0, []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(60)

    def _ask(self):
        while not self._stop.is_set():
            try:
                (tokens,) = self.server.tokens([[5, 17, 99]], max_new_tokens=24)
                self.answers += len(tokens) == 24
            except Exception as error:
                self.failures.append(error)
