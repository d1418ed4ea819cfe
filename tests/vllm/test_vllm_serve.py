"""A real `vllm serve --load-format mx`: READY means that it answers, and its load is what its queue and cache say."""

from __future__ import annotations

import pytest

from tests.support.serving_watch import a_served_replica
from tests.support.vllm_server import SLOTS, VllmServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LONG = 100


def test_a_served_replica_is_ready_when_it_answers_and_publishes_its_load(fleet, small_model, free_port):
    server = VllmServer(small_model[0], free_port, env=fleet.environment)
    fleet.processes.append(server)

    def complete(port, tokens):
        (answer,) = server.tokens([[5, 17, 99]], tokens)
        return len(answer)

    a_served_replica(server, free_port, fleet.address, complete, slots=SLOTS, long=LONG)
