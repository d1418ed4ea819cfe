"""Real SGLang engines and servers on the CPU, each in processes of its own, around one directory."""

from __future__ import annotations

import pytest

from examples.first_light.replica import free_port
from tests.support.fleet import MODEL, START_SECONDS, Fleet, small_model
from tests.support.sglang_options import PYTHON
from tests.support.sglang_server import SglangServer

__all__ = ["MODEL", "START_SECONDS", "SglangFleet", "fleet", "small_model"]


@pytest.fixture
def fleet(tmp_path):
    """Starts engines, servers and other processes that share a directory, and ends them."""
    with SglangFleet.started(tmp_path, "tests.support.sglang_engine", interpreter=PYTHON, group=True) as made:
        yield made


class SglangFleet(Fleet):
    def server(self, model, env=None, **options):
        """A server that has been started; `wait_healthy` waits for it."""
        return self.keep(SglangServer(model, free_port(), env={**self.environment, **(env or {})}, **options))
