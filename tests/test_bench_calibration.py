"""bench/routing/calibration.py: costs of a first token are found again, and who had to queue does not count."""

from random import Random

import pytest

from bench.routing.calibration import Timed, fit, unqueued
from bench.routing.outcome import Sample


def timed(arrived: float, worker: str, ttft: float, num_computed: int = 1) -> Timed:
    return Timed(arrived, ttft, worker, Sample(ttft, 100 + num_computed, 100))


def test_only_who_finds_its_worker_idle_tells_what_things_cost() -> None:
    first, second, third = timed(0.0, "p0", 1.0), timed(0.5, "p0", 1.0), timed(2.0, "p0", 1.0)
    elsewhere = timed(0.5, "p1", 1.0)
    assert unqueued([third, elsewhere, second, first]) == [first, elsewhere, third]


def test_costs_are_found_again_whatever_a_few_late_ones_say() -> None:
    rng, requests = Random(1), []
    for number in range(60):
        num_computed = rng.choice((65, 129, 1025))
        ttft = 0.03 + 1e-4 * num_computed
        requests.append(timed(float(number), "p0", ttft * (10 if number % 12 == 0 else 1), num_computed))
    costs = fit(requests, mean_step_seconds=0.01 + 1e-4 * 300, mean_step_tokens=300)
    assert (costs.delay, costs.step, costs.token) == pytest.approx((0.02, 0.01, 1e-4), rel=0.01)
    assert sorted(costs.slowness)[0] == pytest.approx(1.0)
    assert sum(each > 9 for each in costs.slowness) == 5


def test_equal_requests_tell_nothing() -> None:
    with pytest.raises(ValueError, match="20 requests, or all alike"):
        fit([timed(float(number), "p0", 1.0) for number in range(20)], 0.01, 1)
