"""What work and links cost, from what they have cost lately. Pure: amounts and seconds are arguments."""

from dataclasses import dataclass

_KEEP = 0.9  # of the past, with each new measurement
_LATENCY_WEIGHT = 0.3


class Rate:
    """Units per second: sums of both that fade with each measurement, so that small ones count little."""

    def __init__(self, prior: float, prior_seconds: float) -> None:
        """`prior_seconds`: how much measured time outweighs the prior."""
        self._amount, self._seconds = prior * prior_seconds, prior_seconds

    @property
    def per_second(self) -> float:
        return self._amount / self._seconds

    def observe(self, amount: float, seconds: float) -> None:
        if amount > 0 and seconds > 0:
            self._amount = _KEEP * self._amount + amount
            self._seconds = _KEEP * self._seconds + seconds


@dataclass(frozen=True, slots=True)
class Prior:
    """What a link is taken for before it has been used: latency in seconds, bytes per second."""

    latency: float
    bandwidth: float


class Link:
    """The way to one place that has KV."""

    def __init__(self, prior: Prior) -> None:
        self.latency = prior.latency
        self._bandwidth = Rate(prior.bandwidth, 0.01)

    def seconds(self, num_bytes: int) -> float:
        """How long it may take to get this much."""
        return self.latency + num_bytes / self._bandwidth.per_second

    def observe(self, num_bytes: int, seconds: float, first_bytes: int, first_seconds: float) -> None:
        """The first bytes came after `first_seconds` and everything after `seconds`."""
        self._bandwidth.observe(num_bytes - first_bytes, seconds - first_seconds)
        waited = max(0.0, first_seconds - first_bytes / self._bandwidth.per_second)
        self.latency += _LATENCY_WEIGHT * (waited - self.latency)
