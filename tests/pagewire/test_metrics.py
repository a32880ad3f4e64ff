"""Metrics: names that dashboards rely on, and an endpoint that starts, answers and ends."""

import urllib.request

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pagewire.metrics import MetricsServer, RouterMetrics, RpcMetrics, WorkerMetrics
from pagewire.ports import BindError


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
