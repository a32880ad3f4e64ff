"""When requests are sent: gamma-distributed gaps around a rate. Pure."""

import math

import numpy as np
from numpy.typing import NDArray


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
