"""Prometheus metrics of KV that moves to the work: where cached tokens were, what was fetched, lent, declined."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from pagewire.metrics import LABELS


class FetchMetrics:
    """Of one worker. Sources: local_device, local_host, local_disk, store, remote_prefill, remote_decode."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, (*LABELS, *labels), registry=registry)

        self._name = model_name
        self._hit_tokens = counter("pagewire:hit_tokens", "Prompt tokens not computed, by where they were.", "source")
        self._fetched_tokens = counter("pagewire:fetched_tokens", "Prompt tokens fetched from others.", "source")
        self.fetched_blocks = counter("pagewire:fetched_blocks", "KV blocks fetched and verified.").labels(model_name)
        self.fetched_bytes = counter("pagewire:fetched_bytes", "KV bytes fetched.").labels(model_name)
        self._failures = counter("pagewire:fetch_failures", "Fetches that failed or were late, by reason.", "reason")
        self._declined = counter(
            "pagewire:fetches_declined", "Fetches not tried: computing was cheaper, or no room.", "reason"
        )
        self._unfetched = counter(
            "pagewire:unfetched_tokens", "Prompt tokens computed although others were said to hold them.", "reason"
        )
        self.computed_tokens = counter(
            "pagewire:computed_prompt_tokens", "Tokens computed by sequences that still prefill."
        ).labels(model_name)
        self.lent_blocks = counter("pagewire:lent_blocks", "Cached blocks lent to other workers.").labels(model_name)
        self._lent_from_tier = counter(
            "pagewire:lent_tier_blocks", "Those of them that were loaded from a tier for it.", "tier"
        )
        self.lends_refused = counter("pagewire:lends_refused", "Loans refused for lack of blocks.").labels(model_name)
        self.lends_revoked = counter("pagewire:lends_revoked", "Loans ended since own requests lacked blocks.").labels(
            model_name
        )
        self.num_lent_tickets = Gauge(
            "pagewire:num_lent_tickets", "Tickets over cached blocks.", LABELS, registry=registry
        ).labels(model_name)

    def hit(self, source: str, num_tokens: int) -> None:
        """Counts tokens that need not be computed."""
        self._hit_tokens.labels(self._name, source).inc(num_tokens)

    def loaded(self, tier: str, num_tokens: int) -> None:
        """Counts tokens that came from a tier below the device; the store is nobody's own."""
        self.hit(tier if tier == "store" else f"local_{tier}", num_tokens)

    def begun(self, num_cached_tokens: int, num_fetched_tokens: int) -> None:
        """Counts what of a request's cached tokens was on the device before; the others are counted as they come."""
        self.hit("local_device", max(0, num_cached_tokens - num_fetched_tokens))

    def fetched(self, role: str, num_blocks: int, num_tokens: int, num_bytes: int) -> None:
        """Counts blocks that came from a worker of this role."""
        self.hit(f"remote_{role}", num_tokens)
        self._fetched_tokens.labels(self._name, f"remote_{role}").inc(num_tokens)
        self.fetched_blocks.inc(num_blocks)
        self.fetched_bytes.inc(num_bytes)

    def lent_from(self, tier: str, num_blocks: int) -> None:
        """Counts lent blocks that were below the device."""
        self._lent_from_tier.labels(self._name, tier).inc(num_blocks)

    def failed(self, reason: str) -> None:
        """Counts one fetch that brought less than it was to bring."""
        self._failures.labels(self._name, reason).inc()

    def declined(self, reason: str) -> None:
        """Counts one fetch that was not tried."""
        self._declined.labels(self._name, reason).inc()

    def unfetched(self, reason: str, num_tokens: int) -> None:
        """Counts tokens that others were said to hold and that are computed here all the same.

        Reasons: dearer, short, off, window (every layer slides), pool (no room), partial (nobody had them after all, or
        a lender's tiers declined), avoided (its last fetch failed), or how the fetch failed.
        """
        self._unfetched.labels(self._name, reason).inc(num_tokens)
