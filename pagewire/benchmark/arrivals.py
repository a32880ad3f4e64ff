"""When requests are sent: gamma-distributed gaps around a rate. Pure."""

import math

import numpy as np
from numpy.typing import NDArray


def ramp_up_rates(num: int, strategy: str, start: float, end: float) -> NDArray[np.float64]:
    """The rate at which each request goes out, [num]: from `start` to `end`, linearly or exponentially, as in vLLM."""
    progress = np.arange(num) / max(num - 1, 1)
    if strategy == "linear":
        return start + (end - start) * progress
    rates: NDArray[np.float64] = start * (end / start) ** progress
    return rates


def ramp_up_times(rates: NDArray[np.float64], burstiness: float, random: np.random.Generator) -> NDArray[np.float64]:
    """Seconds since the start, ascending; [num]. A request's gap has the mean 1 / its rate. Nothing is stretched."""
    if math.isinf(burstiness):
        return np.cumsum(1 / rates)
    return np.cumsum(random.gamma(burstiness, 1 / (rates * burstiness)))


def arrival_times(num: int, rate: float, burstiness: float, random: np.random.Generator) -> NDArray[np.float64]:
    """Seconds since the start, ascending; [num].

    Gaps have mean 1 / rate and shape `burstiness` (1: exponential, a Poisson process; inf: all equal). As in vLLM they
    are stretched so that the last request goes out at num / rate exactly: runs with other seeds have the same rate.
    """
    if math.isinf(rate):
        return np.zeros(num)
    if math.isinf(burstiness):
        return np.arange(1, num + 1) / rate
    times = np.cumsum(random.gamma(burstiness, 1 / (rate * burstiness), num))
    # Gaps so bursty that all of them underflow have nothing to stretch.
    return times * (num / rate / times[-1]) if times[-1] > 0 else np.full(num, num / rate)
