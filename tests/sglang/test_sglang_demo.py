"""`make demo ENGINE=sglang` does what it says, on the real model."""

from __future__ import annotations

import pytest

from tests.support.demo import check_the_demo
from tests.support.sglang_options import PYTHON


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_demo_shows_an_sglang_replica_loading_out_of_another_ones_memory():
    check_the_demo(PYTHON, "sglang")
