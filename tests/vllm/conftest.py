"""Real vLLM engines on the CPU, each in a process of its own, around one directory."""

from __future__ import annotations

import pytest

from tests.support.fleet import MODEL, START_SECONDS, Fleet, small_model

__all__ = ["MODEL", "START_SECONDS", "fleet", "small_model"]


@pytest.fixture
def fleet(tmp_path):
    """Starts engines and other processes that share a directory, and ends them."""
    with Fleet.started(tmp_path, "tests.support.vllm_engine") as made:
        yield made
