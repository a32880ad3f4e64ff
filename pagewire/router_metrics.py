"""A router's Prometheus metrics: latencies in seconds, tokens, outcomes, and how its workers failed it."""

import math
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pagewire.metrics import LABELS, LATENCY_BUCKETS, OfModel, rejected_counter


class TokenMetrics(Collector):
    """Output tokens and the gaps between them: plain numbers, made into metrics when somebody asks.

    A Counter and a Histogram take locks, for every token of every stream. Here one thread counts, and any may read.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model_name = model_name
        self._num_tokens = 0
        self._num_gaps = [0] * (len(LATENCY_BUCKETS) + 1)  # by bucket
        self._seconds = 0.0
        registry.register(self)

    def add(self, num_tokens: int, gap_seconds: float | None) -> None:
        """Tokens go to the client; the gap before each of them, None for a choice's first."""
        self._num_tokens += num_tokens
        if gap_seconds is not None:
            self._num_gaps[bisect_left(LATENCY_BUCKETS, gap_seconds)] += num_tokens
            self._seconds += num_tokens * gap_seconds

    def collect(self) -> Iterator[Metric]:
        labels = (self._model_name,)
        tokens = CounterMetricFamily("vllm:generation_tokens", "Tokens sent to clients.", labels=LABELS)
        tokens.add_metric(labels, self._num_tokens)
        yield tokens
        name, text = "vllm:inter_token_latency_seconds", "Between tokens of a choice."
        gaps = HistogramMetricFamily(name, text, labels=LABELS)
        bounds = map(floatToGoString, (*LATENCY_BUCKETS, math.inf))
        gaps.add_metric(labels, list(zip(bounds, accumulate(self._num_gaps), strict=True)), self._seconds)
        yield gaps


class RouterMetrics:
    """What a router sees of requests: latencies in seconds, tokens, outcomes, and how its workers failed it."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        make = OfModel(registry, model_name)
        counter, gauge, histogram = make.counter, make.gauge, make.histogram
        self.num_requests_running = gauge("vllm:num_requests_running", "Requests in flight.")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of accepted requests.")
        self.tokens = TokenMetrics(registry, model_name)
        self.time_to_first_token = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.")
        self.e2e_request_latency = histogram("vllm:e2e_request_latency_seconds", "Arrival to end.")
        self.request_queue_time = histogram("vllm:request_queue_time_seconds", "Arrival to acceptance by a worker.")
        self.prefix_cache_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the index.")
        self.prefix_cache_hits = counter("vllm:prefix_cache_hits", "Prompt tokens that a worker had cached.")
        success = Counter(
            "vllm:request_success",
            "Requests that ended well, by finish reason.",
            (*LABELS, "finished_reason"),
            registry=registry,
        )
        # Bound once: labels() takes several times as long as inc().
        self._request_success = {reason: success.labels(model_name, reason) for reason in ("stop", "length", "abort")}
        self._request_failures = Counter(
            "pagewire:request_failures",
            "Requests that ended badly, by status code.",
            (*LABELS, "code"),
            registry=registry,
        )
        self.migrations = counter("pagewire:migrations", "Requests re-admitted elsewhere after a worker was lost.")
        self.class_changes = counter("pagewire:class_changes", "Migrations to a worker of another numerics class.")
        self.prefill_retries = counter("pagewire:prefill_retries", "Prefills moved to another prefill worker.")
        self.local_prefills = counter("pagewire:local_prefills", "Requests whose decode worker prefilled.")
        self.num_workers_alive = gauge("pagewire:num_workers_alive", "Workers that requests may go to.")
        self.index_connected = gauge("pagewire:index_connected", "1 while the prefix index is reachable.")
        self._rejected = rejected_counter(registry)
        self._breaker_state = Gauge(
            "pagewire:breaker_state",
            "Circuit breaker of a worker: 0 closed, 1 half-open, 2 open; none if it never failed.",
            (*LABELS, "worker"),
            registry=registry,
        )
        self.breaker_opens = counter("pagewire:breaker_opens", "How often a worker's circuit breaker opened.")
        self.index_blocks = gauge("pagewire:index_blocks", "Block entries in the view, summed over the workers.")
        self.index_lag = gauge(
            "pagewire:index_lag_seconds", "How far the view is behind Redis; without Redis, for how long it was."
        )
        self.index_reads = gauge(
            "pagewire:index_worker_reads", "Workers read as a whole so far: when they came, or events were lost."
        )
        hits = Counter(
            "pagewire:hit_tokens",
            "Prompt tokens that were not computed, by where their KV lay.",
            (*LABELS, "source"),
            registry=registry,
        )
        self._hit_tokens = {source: hits.labels(model_name, source) for source in ("prefill_device", "decode_device")}
        self.expected_hits = counter(
            "pagewire:expected_hits", "Requests for which the index promised a hit on the device."
        )
        self.stale_hits = counter("pagewire:stale_hits", "Those of them for which the worker had less than that.")
        self.stale_hit_tokens = counter("pagewire:stale_hit_tokens", "Prompt tokens that the index promised in vain.")
        self.missed_assumed_tokens = counter(
            "pagewire:missed_assumed_tokens",
            "Prompt tokens that a worker was assumed to have soon, because of earlier requests, and did not have.",
        )
        self.duplicate_prefill_tokens = counter(
            "pagewire:duplicate_prefill_tokens",
            "Prompt tokens that were computed though some live worker had their KV.",
        )
        self._model_name = model_name

    def rejected(self, reason: str) -> None:
        """Counts one request that was refused before a worker was asked."""
        self._rejected.labels(self._model_name, reason).inc()

    def breaker(self, worker_id: str, state: int | None) -> None:
        """A worker's breaker has changed; None: the worker is gone."""
        if state is None:
            with suppress(KeyError):
                self._breaker_state.remove(self._model_name, worker_id)
            return
        self._breaker_state.labels(self._model_name, worker_id).set(state)
        if state == 2:
            self.breaker_opens.inc()

    def hit_tokens(self, source: str, num_tokens: int) -> None:
        """Counts tokens whose KV lay on "prefill_device" or "decode_device"."""
        self._hit_tokens[source].inc(num_tokens)

    def request_success(self, finished_reason: str) -> None:
        """Counts one request that ended with "stop", "length" or "abort"."""
        self._request_success[finished_reason].inc()

    def request_failure(self, code: str) -> None:
        """Counts one request that ended with the named status code."""
        self._request_failures.labels(self._model_name, code).inc()
