"""Whether to load blocks from a tier or to compute them, by what both have cost lately. Pure."""

from collections.abc import Sequence

from engine.rates import Link, Prior, Rate

PRIORS = {"host": Prior(0.0005, 4e9), "disk": Prior(0.001, 500e6), "store": Prior(0.002, 300e6)}
"""Seconds before the first block and bytes per second, by tier, before it was used."""
PREFILL_PRIOR = 1000.0
"""Tokens computed per second before any was seen."""
_STALE_SECONDS = 30.0
"""A measurement says nothing after that: else a tier that was slow once would never be asked again."""


class LoadCosts:
    """Of one tier. `now` is in seconds of any one clock. Blocks have `block_size` tokens and take `block_bytes` bytes.

    `prefill`, the rate of computing, may be replaced by one that all tiers share.
    """

    def __init__(self, block_size: int, block_bytes: int, prior: Prior, prefill: Rate | None = None) -> None:
        self.prefill = Rate(PREFILL_PRIOR, 0.1) if prefill is None else prefill
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._prior = prior
        self._link = Link(prior)
        self._measured_at = float("-inf")

    def compute_seconds(self, num_blocks: int) -> float:
        return num_blocks * self._block_size / self.prefill.per_second

    def load_seconds(self, num_blocks: int, now: float) -> float:
        if now - self._measured_at > _STALE_SECONDS:
            self._link = Link(self._prior)
        return self._link.seconds(num_blocks * self._block_bytes)

    @property
    def share_of_computing(self) -> float:
        """What one more block takes to load, where computing it takes 1."""
        seconds = self._link.seconds(self._block_bytes) - self._link.latency
        return seconds / self.compute_seconds(1)

    def is_cheaper(self, num_blocks: int, now: float, num_loaded: int | None = None) -> bool:
        """Loading so many blocks rather than computing them; with several KV groups that is `num_loaded` to load."""
        num_loaded = num_blocks if num_loaded is None else num_loaded
        return self.compute_seconds(num_blocks) > self.load_seconds(num_loaded, now)

    def deadline(self, num_blocks: int, now: float, slack: float, least: float, num_loaded: int | None = None) -> float:
        """How long a request waits: `slack` times the estimate, no longer than computing takes, but `least` seconds."""
        estimate = slack * self.load_seconds(num_blocks if num_loaded is None else num_loaded, now)
        return max(least, min(estimate, self.compute_seconds(num_blocks)))

    def observe(self, num_blocks: int, first: float, rest: float, now: float, *, num_first: int = 0) -> None:
        """The first `num_first` blocks took `first` seconds (of 0 blocks: the answer what is there), and all
        `num_blocks` were here `rest` seconds after them."""
        num_bytes, first_bytes = num_blocks * self._block_bytes, num_first * self._block_bytes
        self._link.observe(num_bytes, first + rest, first_bytes, first)
        self._measured_at = now

    def observe_nothing(self, seconds: float, now: float) -> None:
        """No block was here when they were given up after `seconds`: it takes longer, who knows how much. Twice that
        must do, else a deadline of what computing takes would never teach that computing is cheaper."""
        self._link.latency = max(self._link.latency, 2 * seconds)
        self._measured_at = now


def best_load(choices: Sequence[tuple[int, Sequence[tuple[LoadCosts, int]]]], now: float) -> int | None:
    """Which of the choices saves most; None if none does. Each is how many blocks need not be computed then, and what
    is to be loaded for it: tiers and how many blocks of each.

    Whatever is not loaded is computed, and all that comes after it, so a slow tier may be worth its while only for a
    fast one behind it.
    """
    best, most = None, 0.0
    for i, (num_saved, loads) in enumerate(choices):
        used = [(costs, num_blocks) for costs, num_blocks in loads if num_blocks]  # of others no latency is paid
        if not used:
            continue
        saving = used[0][0].compute_seconds(num_saved) - sum(costs.load_seconds(num, now) for costs, num in used)
        if saving > most:
            best, most = i, saving
    return best
