"""Whether to load blocks from a shared store or to compute them, by what both have cost lately. Pure."""

from engine.rates import Link, Prior, Rate

_PRIOR = Prior(latency=0.002, bandwidth=300e6)
_STALE_SECONDS = 30.0
"""A measurement says nothing after that: else a store that was slow once would never be asked again."""


class StoreCosts:
    """`now` is in seconds of any one clock. Blocks have `block_size` tokens and take `value_bytes` bytes."""

    def __init__(self, block_size: int, value_bytes: int, prior_prefill: float = 1000.0) -> None:
        """`prior_prefill`: tokens computed per second before any was seen."""
        self.prefill = Rate(prior_prefill, 0.1)
        self._block_size = block_size
        self._value_bytes = value_bytes
        self._link = Link(_PRIOR)
        self._measured_at = float("-inf")

    def compute_seconds(self, num_blocks: int) -> float:
        return num_blocks * self._block_size / self.prefill.per_second

    def load_seconds(self, num_blocks: int, now: float) -> float:
        if now - self._measured_at > _STALE_SECONDS:
            self._link = Link(_PRIOR)
        return self._link.seconds(num_blocks * self._value_bytes)

    def is_cheaper(self, num_blocks: int, now: float) -> bool:
        """Loading so many blocks rather than computing them."""
        return self.load_seconds(num_blocks, now) < self.compute_seconds(num_blocks)

    def deadline(self, num_blocks: int, now: float, slack: float, least: float) -> float:
        """How long a request waits: `slack` times the estimate, no longer than computing takes, but `least` seconds."""
        estimate = slack * self.load_seconds(num_blocks, now)
        return max(least, min(estimate, self.compute_seconds(num_blocks)))

    def observe(self, num_blocks: int, asked: float, loaded: float, now: float) -> None:
        """The answer what is there took `asked` seconds, and `num_blocks` were here `loaded` seconds after it."""
        self._link.observe(num_blocks * self._value_bytes, asked + loaded, 0, asked)
        self._measured_at = now

    def observe_nothing(self, seconds: float, now: float) -> None:
        """No block was here when they were given up after `seconds`: it takes longer, who knows how much. Twice that
        must do, else a deadline of what computing takes would never teach that computing is cheaper."""
        self._link.latency = max(self._link.latency, 2 * seconds)
        self._measured_at = now
