"""bench/routing: the real policy, index and pools of a simulated cluster."""

import logging

import pytest

from bench.routing.cluster import Cluster
from bench.routing.workers import Machine
from bench.routing.workload import Workload


@pytest.fixture(autouse=True)
def no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "router")


@pytest.mark.parametrize("seed", [0, 1])
def test_workers_that_can_carry_a_load_get_to_carry_it_from_a_cold_start(seed: int) -> None:
    """At first every prompt is computed in full, and queues grow longer than a prompt. If requests then go where the
    queue is shorter but nothing is cached, queues stay long for ever, at half of the load that can be carried."""
    machine = Machine(num_prefill=3, num_decode=2, prefill_rate=4000.0)
    outcome = Cluster(machine, Workload(0.73, 20, 3), "prefix", 16.0, seed).run(35.0, 20.0)
    assert outcome.hit_rate > 0.93
    assert outcome.ttft_p90 < 1.0
