"""What a request's life adds to the metrics."""

from prometheus_client import Counter

from pagewire.errors import PagewireError
from pagewire.router_metrics import RouterMetrics
from router.placement import Placement
from router.request import Piece, Summary


def _add(counter: Counter, amount: int) -> None:
    """Most of the time it is nothing, and a Counter takes a lock for it."""
    if amount:
        counter.inc(amount)


class RequestObserver:
    """Counts into RouterMetrics, or nowhere. Times are seconds."""

    def __init__(self, metrics: RouterMetrics | None = None) -> None:
        self._metrics = metrics

    def started(self) -> None:
        """A request came in."""
        if self._metrics is not None:
            self._metrics.num_requests_running.inc()

    def ended(self) -> None:
        """It is gone, however."""
        if self._metrics is not None:
            self._metrics.num_requests_running.dec()

    def output(self, piece: Piece, seconds_since_last: float | None) -> None:
        """A piece goes to the client; the time is None for a choice's first."""
        if self._metrics is None:
            return
        count = len(piece.token_ids)
        if count:
            self._metrics.tokens.add(count, None if seconds_since_last is None else seconds_since_last / count)
        if piece.finish_reason is not None:
            self._metrics.request_success(piece.finish_reason.name.lower())

    def faults(self, *, num_migrations: int, num_class_changes: int, num_failed_prefills: int) -> None:
        """What a request, or a step of a beam search, has gone through, however it ended."""
        if self._metrics is not None:
            _add(self._metrics.migrations, num_migrations)
            _add(self._metrics.class_changes, num_class_changes)
            _add(self._metrics.prefill_retries, num_failed_prefills)

    def rejected(self, error: PagewireError) -> None:
        """A request was refused before a worker was asked."""
        if self._metrics is not None:
            self._metrics.rejected(error.rejection)

    def finished(self, summary: Summary, placement: Placement | None = None) -> None:
        """A request ended well; `placement` is None if it ended elsewhere than it was placed first."""
        metrics = self._metrics
        if metrics is None:
            return
        metrics.prompt_tokens.inc(summary.prompt_tokens)
        metrics.prefix_cache_queries.inc(summary.prompt_tokens)
        _add(metrics.prefix_cache_hits, summary.cached_tokens)
        metrics.request_queue_time.observe(summary.queue_ms / 1e3)
        metrics.time_to_first_token.observe(summary.ttft_ms / 1e3)
        metrics.e2e_request_latency.observe(summary.total_ms / 1e3)
        if summary.prefill_worker == summary.decode_worker:
            metrics.local_prefills.inc()
        if placement is not None:
            self._compare_hits(metrics, summary, placement)

    @staticmethod
    def _compare_hits(metrics: RouterMetrics, summary: Summary, placement: Placement) -> None:
        """What the worker had against what the index said when it was chosen."""
        prefills_apart = placement.prefill is not None
        metrics.hit_tokens("prefill_device" if prefills_apart else "decode_device", summary.cached_tokens)
        _add(metrics.expected_hits, int(placement.num_device_tokens > 0))
        if summary.cached_tokens < placement.num_device_tokens:
            metrics.stale_hits.inc()
            metrics.stale_hit_tokens.inc(placement.num_device_tokens - summary.cached_tokens)
        assumed = placement.num_assumed_tokens - max(summary.cached_tokens, placement.num_hit_tokens)
        _add(metrics.missed_assumed_tokens, max(0, assumed))
        _add(metrics.duplicate_prefill_tokens, max(0, placement.num_best_tokens - summary.cached_tokens))

    def failed(self, code: str) -> None:
        """A request ended with an error; `code` is the gRPC status's name."""
        if self._metrics is not None:
            self._metrics.request_failure(code)
