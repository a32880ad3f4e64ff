"""Metrics: names that dashboards rely on, and an endpoint that starts, answers and ends."""

import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from pagewire.fetch_metrics import FetchMetrics
from pagewire.metrics import MetricsServer, RpcMetrics
from pagewire.ports import BindError
from pagewire.router_metrics import RouterMetrics, TokenMetrics
from pagewire.worker_metrics import WorkerMetrics

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_router_metrics_bear_vllms_names() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry, "m")
    metrics.num_requests_running.inc()
    metrics.time_to_first_token.observe(0.02)
    metrics.request_success("stop")
    metrics.request_failure("UNAVAILABLE")
    text = generate_latest(registry).decode()
    for line in (
        'vllm:num_requests_running{model_name="m"} 1.0',
        'vllm:prompt_tokens_total{model_name="m"} 0.0',
        'vllm:generation_tokens_total{model_name="m"} 0.0',
        'vllm:time_to_first_token_seconds_bucket{le="0.025",model_name="m"} 1.0',
        'vllm:inter_token_latency_seconds_count{model_name="m"} 0.0',
        'vllm:e2e_request_latency_seconds_count{model_name="m"} 0.0',
        'vllm:request_success_total{finished_reason="stop",model_name="m"} 1.0',
        'pagewire:request_failures_total{code="UNAVAILABLE",model_name="m"} 1.0',
    ):
        assert line in text


def test_gaps_between_tokens_are_counted_as_a_histogram_counts() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tokens = TokenMetrics(ours, "m")
    buckets = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
    name, labels = "vllm:inter_token_latency_seconds", ("model_name",)
    histogram = Histogram(name, "Between tokens of a choice.", labels, buckets=buckets, registry=theirs).labels("m")
    for num_tokens, gap in ((1, None), (1, 0.0), (3, 0.001), (2, 0.0011), (1, 0.3), (1, 300.0), (1, 301.0)):
        tokens.add(num_tokens, gap)
        for _ in range(0 if gap is None else num_tokens):
            histogram.observe(gap)
    text = generate_latest(ours).decode()
    for line in generate_latest(theirs).decode().splitlines():
        assert "_created" in line or line in text
    assert 'vllm:generation_tokens_total{model_name="m"} 10.0' in text


def test_worker_metrics_bear_vllms_names() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "m")
    metrics.kv_cache_usage(0.25)
    metrics.cache_config(block_size=16, num_blocks=100, enable_caching=True)
    metrics.prefill_tokens_on_decode.inc(3)
    metrics.transfer_failure("checksum")
    text = generate_latest(registry).decode()
    for line in (
        'vllm:num_requests_running{model_name="m"} 0.0',
        'vllm:num_requests_waiting{model_name="m"} 0.0',
        'vllm:kv_cache_usage_perc{model_name="m"} 0.25',
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.25',
        'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",model_name="m",num_gpu_blocks="100"} 1.0',
        'vllm:prefix_cache_queries_total{model_name="m"} 0.0',
        'vllm:prefix_cache_hits_total{model_name="m"} 0.0',
        'pagewire:prefill_tokens_on_decode_total{model_name="m"} 3.0',
        'pagewire:transfer_failures_total{model_name="m",reason="checksum"} 1.0',
    ):
        assert line in text


def _names(make: Callable[[CollectorRegistry], object]) -> set[str]:
    registry = CollectorRegistry()
    make(registry)
    return {family.name for family in registry.collect()}


_ROUTER = ("index_blocks", "index_lag_seconds", "index_worker_reads", "hit_tokens", "expected_hits", "stale_hits",
           "stale_hit_tokens", "missed_assumed_tokens", "duplicate_prefill_tokens")  # fmt: skip
_WORKER = ("hit_tokens", "fetched_tokens", "fetched_blocks", "fetched_bytes", "computed_prompt_tokens",
           "unfetched_tokens", "recomputed_tokens", "fetch_failures", "fetches_declined", "lent_blocks",
           "lent_tier_blocks", "lends_refused", "lends_revoked", "num_lent_tickets", "kv_tier_blocks",
           "kv_tier_events")  # fmt: skip


def test_what_caches_do_is_told_by_the_documented_names() -> None:
    docs = "".join(path.read_text() for path in DOCS.glob("*.md"))

    def worker(registry: CollectorRegistry) -> None:
        WorkerMetrics(registry, "m")
        FetchMetrics(registry, "m")

    router = _names(lambda registry: RouterMetrics(registry, "m"))
    for names, told in ((_ROUTER, router), (_WORKER, _names(worker))):
        for name in names:
            assert f"pagewire:{name}" in told
            assert f"`pagewire:{name}" in docs or f"`{name}" in docs, name


def test_docs_name_no_metric_that_is_not_there() -> None:
    def everything(registry: CollectorRegistry) -> None:
        WorkerMetrics(registry, "m")
        RpcMetrics(registry)

    there = _names(everything) | _names(lambda registry: RouterMetrics(registry, "m"))
    there |= _names(lambda registry: FetchMetrics(registry, "m"))
    for path in DOCS.glob("*.md"):
        named = set(re.findall(r"`(pagewire:[a-z]+_[a-z_]*[a-z])", path.read_text()))
        assert {each.removesuffix("_total") for each in named} <= there, path.name


def test_endpoint_serves_and_ends() -> None:
    registry = CollectorRegistry()
    RpcMetrics(registry).observe("/pagewire.v1.InferenceService/Generate", "OK", 0.5)
    server = MetricsServer(registry, 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as response:
            text = response.read().decode()
        assert 'pagewire:rpc_requests_total{code="OK",method="/pagewire.v1.InferenceService/Generate"} 1.0' in text
        with pytest.raises(BindError, match=rf"cannot serve metrics on 127\.0\.0\.1:{server.port}: "):
            MetricsServer(registry, server.port)
    finally:
        server.close()
    # Closed: the port is free again.
    MetricsServer(registry, server.port).close()
