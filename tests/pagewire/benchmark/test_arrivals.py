"""The arrival process: rate, shape, and what a seed fixes."""

import math

import numpy as np
import pytest

from pagewire.benchmark.arrivals import arrival_times, ramp_up_rates, ramp_up_times


def gaps(burstiness: float, num: int = 20_000) -> np.ndarray:
    return np.diff(arrival_times(num, 50.0, burstiness, np.random.default_rng(3)), prepend=0.0)


def test_inf_sends_all_at_once() -> None:
    assert arrival_times(5, math.inf, 1.0, np.random.default_rng(0)).tolist() == [0.0] * 5


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness: float) -> None:
    """Mean 1 / rate by construction; the variance of gamma with shape b is mean² / b."""
    found = gaps(burstiness)
    assert found.min() >= 0
    assert found.mean() == pytest.approx(1 / 50)
    assert found.var() * 50**2 == pytest.approx(1 / burstiness, rel=0.1)


def test_poisson_has_exponential_gaps() -> None:
    found = 50 * gaps(1.0)
    for quantile in (0.1, 0.5, 0.9):
        assert np.quantile(found, quantile) == pytest.approx(-math.log(1 - quantile), rel=0.05)


def test_the_last_goes_out_when_the_rate_says() -> None:
    for seed in range(5):
        times = arrival_times(40, 8.0, 0.5, np.random.default_rng(seed))
        assert times[-1] == pytest.approx(5.0)
        assert (np.diff(times) >= 0).all()
    assert arrival_times(4, 2.0, math.inf, np.random.default_rng(0)).tolist() == [0.5, 1.0, 1.5, 2.0]


def test_a_seed_fixes_it() -> None:
    first, again, other = (arrival_times(9, 2.0, 1.0, np.random.default_rng(seed)) for seed in (7, 7, 8))
    assert (first == again).all()
    assert (first != other).any()


def test_extreme_burstiness_stays_finite() -> None:
    assert np.isfinite(arrival_times(3, 1.0, 1e-6, np.random.default_rng(0))).all()


def test_a_rate_that_grows() -> None:
    assert ramp_up_rates(5, "linear", 2.0, 10.0).tolist() == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert ramp_up_rates(4, "exponential", 1.0, 8.0) == pytest.approx([1.0, 2.0, 4.0, 8.0])
    assert ramp_up_rates(1, "linear", 2.0, 10.0).tolist() == [2.0]
    rates = ramp_up_rates(40_000, "linear", 10.0, 30.0)
    assert ramp_up_times(rates[:2], math.inf, np.random.default_rng(0)) == pytest.approx([0.1, 0.1 + 1 / rates[1]])
    times = ramp_up_times(rates, 1.0, np.random.default_rng(0))
    for part, rate in ((slice(0, 4000), 11.0), (slice(36_000, 40_000), 29.0)):
        assert np.diff(times[part]).mean() == pytest.approx(1 / rate, rel=0.05)
