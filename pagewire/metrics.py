"""Prometheus metrics of a process: vLLM's names where vLLM has one, `pagewire:` otherwise.

A process makes one CollectorRegistry, one RpcMetrics and one RouterMetrics or WorkerMetrics on it.
"""

import math
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pagewire.ports import BindError

# Seconds. From a cached prompt on a small model to a long prompt on a CPU.
_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_LABELS = ("model_name",)


@dataclass(frozen=True, slots=True)
class _OfModel:
    """Makes metrics that are labelled with the model's name."""

    registry: CollectorRegistry
    model_name: str

    def counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self.registry).labels(self.model_name)

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, _LABELS, registry=self.registry).labels(self.model_name)

    def histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, _LABELS, buckets=_LATENCY_BUCKETS, registry=self.registry).labels(self.model_name)


class RpcMetrics:
    """What the interceptor reports; `observe` goes into `rpc.build_server`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "pagewire:rpc_requests",
            "RPCs that ended, by method and status code.",
            ("method", "code"),
            registry=registry,
        )
        self._seconds = Histogram(
            "pagewire:rpc_seconds",
            "Duration of RPCs, streams included.",
            ("method",),
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self._of: dict[tuple[str, str], tuple[Counter, Histogram]] = {}  # labels() takes locks and makes strings

    def observe(self, method: str, code: str, seconds: float) -> None:
        """Counts one RPC; `method` is the full name ("/pagewire.v1.InferenceService/Generate")."""
        known = self._of.get((method, code))
        if known is None:
            known = self._of[method, code] = self._requests.labels(method, code), self._seconds.labels(method)
        requests, durations = known
        requests.inc()
        durations.observe(seconds)


class TokenMetrics(Collector):
    """Output tokens and the gaps between them: plain numbers, made into metrics when somebody asks.

    A Counter and a Histogram take locks, for every token of every stream. Here one thread counts, and any may read.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model_name = model_name
        self._num_tokens = 0
        self._num_gaps = [0] * (len(_LATENCY_BUCKETS) + 1)  # by bucket
        self._seconds = 0.0
        registry.register(self)

    def add(self, num_tokens: int, gap_seconds: float | None) -> None:
        """Tokens go to the client; the gap before each of them, None for a choice's first."""
        self._num_tokens += num_tokens
        if gap_seconds is not None:
            self._num_gaps[bisect_left(_LATENCY_BUCKETS, gap_seconds)] += num_tokens
            self._seconds += num_tokens * gap_seconds

    def collect(self) -> Iterator[Metric]:
        labels = (self._model_name,)
        tokens = CounterMetricFamily("vllm:generation_tokens", "Tokens sent to clients.", labels=_LABELS)
        tokens.add_metric(labels, self._num_tokens)
        yield tokens
        name, text = "vllm:inter_token_latency_seconds", "Between tokens of a choice."
        gaps = HistogramMetricFamily(name, text, labels=_LABELS)
        bounds = map(floatToGoString, (*_LATENCY_BUCKETS, math.inf))
        gaps.add_metric(labels, list(zip(bounds, accumulate(self._num_gaps), strict=True)), self._seconds)
        yield gaps


class RouterMetrics:
    """What a router sees of requests: latencies in seconds, tokens, outcomes, and how its workers failed it."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        make = _OfModel(registry, model_name)
        counter, gauge, histogram = make.counter, make.gauge, make.histogram
        self.num_requests_running = gauge("vllm:num_requests_running", "Requests in flight.")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of accepted requests.")
        self.tokens = TokenMetrics(registry, model_name)
        self.time_to_first_token = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.")
        self.e2e_request_latency = histogram("vllm:e2e_request_latency_seconds", "Arrival to end.")
        self.request_queue_time = histogram("vllm:request_queue_time_seconds", "Arrival to acceptance by a worker.")
        self.prefix_cache_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the index.")
        self.prefix_cache_hits = counter("vllm:prefix_cache_hits", "Prompt tokens that a worker had cached.")
        self._request_success = Counter(
            "vllm:request_success",
            "Requests that ended well, by finish reason.",
            (*_LABELS, "finished_reason"),
            registry=registry,
        )
        self._request_failures = Counter(
            "pagewire:request_failures",
            "Requests that ended badly, by status code.",
            (*_LABELS, "code"),
            registry=registry,
        )
        self.migrations = counter("pagewire:migrations", "Requests re-admitted elsewhere after a worker was lost.")
        self.class_changes = counter("pagewire:class_changes", "Migrations to a worker of another numerics class.")
        self.prefill_retries = counter("pagewire:prefill_retries", "Prefills moved to another prefill worker.")
        self.local_prefills = counter("pagewire:local_prefills", "Requests whose decode worker prefilled.")
        self.num_workers_alive = gauge("pagewire:num_workers_alive", "Workers that requests may go to.")
        self.index_connected = gauge("pagewire:index_connected", "1 while the prefix index is reachable.")
        self._rejected = _rejected(registry)
        self._breaker_state = Gauge(
            "pagewire:breaker_state",
            "Circuit breaker of a worker: 0 closed, 1 half-open, 2 open; none if it never failed.",
            (*_LABELS, "worker"),
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
        self._hit_tokens = Counter(
            "pagewire:hit_tokens",
            "Prompt tokens that were not computed, by where their KV lay.",
            (*_LABELS, "source"),
            registry=registry,
        )
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
        self._hit_tokens.labels(self._model_name, source).inc(num_tokens)

    def request_success(self, finished_reason: str) -> None:
        """Counts one request that ended with "stop", "length" or "abort"."""
        self._request_success.labels(self._model_name, finished_reason).inc()

    def request_failure(self, code: str) -> None:
        """Counts one request that ended with the named status code."""
        self._request_failures.labels(self._model_name, code).inc()


class WorkerMetrics:
    """What a prefill or decode worker knows of its engine, its pool and its transfers."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        make = _OfModel(registry, model_name)
        counter, gauge, histogram = make.counter, make.gauge, make.histogram
        self.num_requests_running = gauge("vllm:num_requests_running", "Sequences that take part in steps.")
        self.num_requests_waiting = gauge("vllm:num_requests_waiting", "Requests that wait.")
        # The second name is that of older vLLMs, which gateways still ask for.
        self._kv_cache_usage = [
            gauge(name, "Share of blocks that are referenced, 0 … 1.")
            for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
        ]
        self._cache_config = Gauge(
            "vllm:cache_config_info",
            "1; the labels say how large the cache is.",
            (*_LABELS, "block_size", "num_gpu_blocks", "enable_prefix_caching"),
            registry=registry,
        )
        self._lora_requests = Gauge(
            "vllm:lora_requests_info",
            "When it was so; the labels name the adapters of running and waiting requests.",
            ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            registry=registry,
        )
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens sampled.")
        self.prefix_cache_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self.prefix_cache_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.")
        self.num_preemptions = counter("vllm:num_preemptions", "Sequences whose blocks were taken back.")
        self.spec_decode_num_drafts = counter("vllm:spec_decode_num_drafts", "Drafts that were checked.")
        self.spec_decode_num_draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Tokens in drafts.")
        self.spec_decode_num_accepted_tokens = counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafted tokens that the model drew too."
        )
        self.step_seconds = histogram("pagewire:step_seconds", "Duration of engine steps.")
        self.prefill_tokens_on_decode = counter(
            "pagewire:prefill_tokens_on_decode", "Prompt tokens that a decode worker computed by itself."
        )
        self.transfer_bytes = counter("pagewire:transfer_bytes", "KV bytes received.")
        self.transfer_blocks = counter("pagewire:transfer_blocks", "KV blocks received and verified.")
        self.transfer_overlap_blocks = counter(
            "pagewire:transfer_overlap_blocks", "KV blocks received while their prefill was still running."
        )
        self.transfer_seconds = histogram("pagewire:transfer_seconds", "Attach to end of a pull.")
        self._transfer_failures = Counter(
            "pagewire:transfer_failures", "Pulls that failed, by reason.", (*_LABELS, "reason"), registry=registry
        )
        self.transfer_retries = counter("pagewire:transfer_retries", "Pulls that were started over after a failure.")
        self.transfers_failed = counter(
            "pagewire:transfers_failed",
            "Requests given back because their KV did not come (kv-load-failure-policy fail).",
        )
        self.recomputed_tokens = counter(
            "pagewire:recomputed_tokens", "Prompt tokens computed on decode because their transfer had failed."
        )
        self._rejected = _rejected(registry)
        self.requests_cancelled = counter("pagewire:requests_cancelled", "Requests given up before their end.")
        self.deadlines_exceeded = counter("pagewire:deadlines_exceeded", "Requests whose time was over on this worker.")
        self.num_tickets = gauge("pagewire:num_tickets", "Tickets that exist.")
        self._tier_blocks = Gauge(
            "pagewire:kv_tier_blocks",
            "KV blocks below the pool, by tier; the store's are all workers'.",
            (*_LABELS, "tier"),
            registry=registry,
        )
        self._tier_events = Counter(
            "pagewire:kv_tier_events",
            "Blocks of a tier: stored, evicted, lost (gone before they were written back), failed (to be written) or "
            "corrupt; declined: computing was cheaper than loading. Of the store failed counts questions, late loads.",
            (*_LABELS, "tier", "event"),
            registry=registry,
        )
        self.num_held_blocks = gauge("pagewire:num_held_blocks", "Blocks held for transfers.")
        self.leases_expired = counter("pagewire:leases_expired", "Tickets whose lease ran out.")
        self.leases_revoked = counter("pagewire:leases_revoked", "Tickets revoked after max_hold under pressure.")
        self.leases_deserted = counter("pagewire:leases_deserted", "Tickets whose holder's connection broke for good.")
        self._model_name = model_name

    def cache_config(self, *, block_size: int, num_blocks: int, enable_caching: bool) -> None:
        """Told once: what schedulers outside turn shares into tokens by. (Blocks are vLLM's "GPU blocks" anywhere.)"""
        self._cache_config.labels(self._model_name, block_size, num_blocks, enable_caching).set(1)

    def lora_requests_info(self, max_loras: int, running: Sequence[str], waiting: Sequence[str]) -> None:
        """Replaces what was said before, so that old names do not pile up."""
        self._lora_requests.clear()
        self._lora_requests.labels(max_loras, ",".join(running), ",".join(waiting)).set_to_current_time()

    def kv_cache_usage(self, share: float) -> None:
        """Share of blocks that are referenced, 0 … 1."""
        for gauge in self._kv_cache_usage:
            gauge.set(share)

    def tier(self, name: str, num_blocks: int, new_events: Mapping[str, int]) -> None:
        """What a tier holds now, and what has happened in it since the last call."""
        self._tier_blocks.labels(self._model_name, name).set(num_blocks)
        for event, num in new_events.items():
            self._tier_events.labels(self._model_name, name, event).inc(num)

    def transfer_failure(self, reason: str) -> None:
        """Counts one failed pull: "checksum", "generation" or "frame" (bytes that were dropped), "peer", "epoch" …"""
        self._transfer_failures.labels(self._model_name, reason).inc()

    def rejected(self, reason: str) -> None:
        """Counts one request that was refused at once."""
        self._rejected.labels(self._model_name, reason).inc()


def _rejected(registry: CollectorRegistry) -> Counter:
    text = "Requests that were refused at once: what was full (max_queued_requests …), else the status code."
    return Counter("pagewire:requests_rejected", text, (*_LABELS, "reason"), registry=registry)


class MetricsServer:
    """Serves a registry at http://host:port/metrics from a thread of its own until `close`."""

    def __init__(self, registry: CollectorRegistry, port: int, host: str = "127.0.0.1") -> None:
        try:
            started: tuple[Any, threading.Thread] = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise BindError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from None
        self._server: WSGIServer = started[0]
        self._thread = started[1]

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stops serving; returns when the thread has ended."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
