"""A run's numbers as text, laid out like vLLM's. Pure."""

from collections.abc import Mapping
from typing import Any

from pagewire.benchmark.options import MetricName
from pagewire.benchmark.statistics import Summary

TITLES: dict[MetricName, tuple[str, str]] = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
_WIDTH = 50


def totals(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of what is no latency."""
    rows: list[tuple[str, Any, str]] = [
        ("Successful requests:", result["completed"], "d"),
        ("Failed requests:", result["failed"], "d"),
        *((f"  {code}:", count, "d") for code, count in result["errors_by_code"].items()),
    ]
    if result["max_concurrency"] is not None:
        rows.append(("Maximum request concurrency:", result["max_concurrency"], "d"))
    if result["request_rate"] != "inf":
        rows.append(("Request rate configured (RPS):", result["request_rate"], ".2f"))
    rows += [
        ("Benchmark duration (s):", result["duration"], ".2f"),
        ("Total input tokens:", result["total_input_tokens"], "d"),
        ("Total cached input tokens:", result["total_cached_tokens"], "d"),
        ("Total generated tokens:", result["total_output_tokens"], "d"),
        ("Request throughput (req/s):", result["request_throughput"], ".2f"),
    ]
    if result["request_goodput"] is not None:
        rows.append(("Request goodput (req/s):", result["request_goodput"], ".2f"))
    rows += [
        ("Output token throughput (tok/s):", result["output_throughput"], ".2f"),
        ("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"], ".2f"),
        ("Peak concurrent requests:", result["max_concurrent_requests"], "d"),
        ("Total token throughput (tok/s):", result["total_token_throughput"], ".2f"),
    ]
    return [(name, format(value, form)) for name, value, form in rows]


def render(result: Mapping[str, Any], found: Mapping[MetricName, Summary]) -> str:
    """The whole table."""
    title = " Interrupted: what was measured " if result["interrupted"] else " Serving Benchmark Result "
    lines = [title.center(_WIDTH, "=")]
    lines += [f"{name:<40} {value}" for name, value in totals(result)]
    for metric, summary in found.items():
        short, long = TITLES[metric]
        lines.append(long.center(_WIDTH, "-"))
        rows = [("Mean", summary.mean), ("Median", summary.median), ("Std", summary.std)]
        rows += [(f"P{which:g}", value) for which, value in summary.percentiles]
        lines += [f"{f'{name} {short} (ms):':<40} {value:.2f}" for name, value in rows]
    return "\n".join([*lines, "=" * _WIDTH])
