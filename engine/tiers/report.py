"""What the tiers have and did, as metrics."""

from engine.tiers.kv_tiers import KvTiers
from pagewire.worker_metrics import WorkerMetrics


class TierReport:
    """Turns counts since the start into increments."""

    def __init__(self, tiers: KvTiers | None, metrics: WorkerMetrics) -> None:
        self._tiers = tiers
        self._metrics = metrics
        self._known: dict[str, dict[str, int]] = {}

    def observe(self) -> None:
        """Reports what has changed since the last call."""
        for name, (num_blocks, events) in ({} if self._tiers is None else self._tiers.counts()).items():
            known = self._known.get(name, {})
            self._metrics.tier(name, num_blocks, {event: num - known.get(event, 0) for event, num in events.items()})
            self._known[name] = events
