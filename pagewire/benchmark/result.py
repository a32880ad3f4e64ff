"""The result of a run as JSON, under the names of `vllm bench serve`'s, and the names of its files. Pure."""

import json
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from pagewire.benchmark.goodput import num_that_meet
from pagewire.benchmark.options import MetricName, ServeBenchOptions
from pagewire.benchmark.outcome import Run
from pagewire.benchmark.statistics import Summary, peak_concurrency, seconds_of, summarize, tokens_over_time

# One entry per request, or per token: only with --save-detailed.
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times",
           "generated_texts", "errors")  # fmt: skip


def reported_metrics(options: ServeBenchOptions) -> tuple[MetricName, ...]:
    """Without repetitions, in the order in which they were asked for."""
    return tuple(dict.fromkeys(options.percentile_metrics))


def summaries(options: ServeBenchOptions, run: Run) -> dict[MetricName, Summary]:
    """What the options ask for."""
    return {
        metric: summarize(seconds_of(metric, run.outcomes), options.metric_percentiles)
        for metric in reported_metrics(options)
    }


def result_json(
    options: ServeBenchOptions,
    run: Run,
    *,
    model: str,
    date: datetime,
    goodput: Mapping[str, float],
    metadata: Mapping[str, str],
) -> dict[str, Any]:
    """Everything, details too. Beyond vLLM's names: `errors_by_code`, `interrupted`, `total_cached_tokens`."""
    return {
        **_setup(options, model, date),
        **metadata,
        **_totals(run, goodput),
        **_details(run),
        **_statistics(summaries(options, run)),
    }


def _setup(options: ServeBenchOptions, model: str, date: datetime) -> dict[str, Any]:
    return {
        "date": date.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": model,
        "tokenizer_id": None if options.tokenizer is None else str(options.tokenizer),
        "num_prompts": options.num_prompts,
        "dataset_name": options.dataset_name,
        "seed": options.seed,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        **_ramp_up(options),
        "burstiness": "inf" if math.isinf(options.burstiness) else options.burstiness,
        "max_concurrency": options.max_concurrency,
    }


def _totals(run: Run, goodput: Mapping[str, float]) -> dict[str, Any]:
    good, duration = run.good, max(run.duration, 1e-9)
    num_input = sum(outcome.num_prompt_tokens for outcome in good)
    num_output = sum(outcome.num_output_tokens for outcome in good)
    seconds = tokens_over_time(good, 1.0, math.ceil(run.duration) + 1)
    return {
        "duration": run.duration,
        "completed": len(good),
        "failed": len(run.outcomes) - len(good),
        "errors_by_code": run.errors_by_code,
        "interrupted": run.num_unfinished > 0,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_cached_tokens": sum(outcome.num_cached_tokens for outcome in good),
        "request_throughput": len(good) / duration,
        "request_goodput": num_that_meet(good, goodput) / duration if goodput else None,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_output_tokens_per_s": float(seconds.max()),
        "max_concurrent_requests": peak_concurrency(good),
    }


def _details(run: Run) -> dict[str, Any]:
    outcomes = run.outcomes
    return {
        "input_lens": [outcome.num_prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.num_output_tokens if outcome.is_good else 0 for outcome in outcomes],
        "ttfts": [outcome.ttft or 0.0 for outcome in outcomes],
        "itls": [outcome.itls for outcome in outcomes],
        "latencies": [outcome.latency for outcome in outcomes],
        "start_times": [outcome.sent_at for outcome in outcomes],
        "queue_times": [outcome.queue_time for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [f"{outcome.code}: {outcome.error}" if outcome.code else "" for outcome in outcomes],
    }


def _statistics(found: Mapping[MetricName, Summary]) -> dict[str, float]:
    named: dict[str, float] = {}
    for metric, summary in found.items():
        named[f"mean_{metric}_ms"] = summary.mean
        named[f"median_{metric}_ms"] = summary.median
        named[f"std_{metric}_ms"] = summary.std
        for which, value in summary.percentiles:
            named[f"p{which:g}_{metric}_ms"] = value
    return named


def result_path(options: ServeBenchOptions, model: str, date: datetime) -> Path:
    """Where the JSON goes; the report takes the same name with another suffix."""
    if options.result_filename is not None:
        return options.result_dir / options.result_filename
    limit = "" if options.max_concurrency is None else f"-concurrency{options.max_concurrency}"
    name = model.rsplit("/", 1)[-1]
    label = options.label or options.backend
    return options.result_dir / f"{label}-{options.request_rate:g}qps{limit}-{name}-{date:%Y%m%d-%H%M%S}.json"


def write_result(path: Path, result: Mapping[str, Any], *, detailed: bool, append: bool) -> None:
    """One JSON object on one line. Raises OSError."""
    kept = {name: value for name, value in result.items() if detailed or name not in DETAILS}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w", encoding="utf-8") as file:
        file.write(json.dumps(kept, ensure_ascii=False) + "\n")


def _ramp_up(options: ServeBenchOptions) -> dict[str, object]:
    names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
    return {} if options.ramp_up_strategy is None else {name: getattr(options, name) for name in names}
