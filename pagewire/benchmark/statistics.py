"""Numbers from outcomes. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.benchmark.options import MetricName
from pagewire.benchmark.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one metric, in milliseconds; zeros if nothing was measured, as in vLLM. `percentiles`: (which, value)."""

    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]


def seconds_of(metric: MetricName, outcomes: Iterable[Outcome]) -> list[float]:
    """What the metric is of those that ended well: one number a request, for itl one a gap."""
    good = [outcome for outcome in outcomes if outcome.is_good]
    if metric == "itl":
        return [gap for outcome in good for gap in outcome.itls]
    if metric == "ttft":
        return [outcome.ttft for outcome in good if outcome.ttft is not None]
    if metric == "tpot":
        return [outcome.tpot for outcome in good if outcome.tpot is not None]
    if metric == "client_queue_time":
        return [outcome.queue_time for outcome in good]
    if metric == "e2el_including_client_queue":
        return [outcome.latency + outcome.queue_time for outcome in good]
    return [outcome.latency for outcome in good]


def summarize(seconds: Sequence[float], percentiles: Sequence[float]) -> Summary:
    """Standard deviation of the population, percentiles by linear interpolation."""
    values = 1e3 * np.asarray(seconds if len(seconds) else [0.0])
    return Summary(
        float(values.mean()),
        float(np.median(values)),
        float(values.std()),
        tuple((which, float(np.percentile(values, which))) for which in percentiles),
    )


def peak_concurrency(outcomes: Iterable[Outcome]) -> int:
    """Most requests that ran at one moment; one that ends then does not overlap one that begins."""
    events = [(outcome.sent_at, 1) for outcome in outcomes]
    events += [(outcome.sent_at + outcome.latency, -1) for outcome in outcomes]
    running = peak = 0
    for _, change in sorted(events):
        running += change
        peak = max(peak, running)
    return peak


def tokens_over_time(outcomes: Iterable[Outcome], width: float, num: int) -> NDArray[np.float64]:
    """Output tokens per second in `num` buckets of `width` seconds from the run's start.

    A request's tokens are spread evenly over its messages: not every server says how many one had.
    """
    tokens = np.zeros(num)
    for outcome in outcomes:
        share = outcome.num_output_tokens / max(1, len(outcome.token_times))
        for moment in outcome.token_times:
            tokens[min(num - 1, int(moment / width))] += share
    return tokens / width


def running_over_time(outcomes: Iterable[Outcome], moments: Sequence[float]) -> NDArray[np.int64]:
    """Requests in flight at each moment."""
    begins = np.sort([outcome.sent_at for outcome in outcomes])
    ends = np.sort([outcome.sent_at + outcome.latency for outcome in outcomes])
    at = np.asarray(moments)
    return np.searchsorted(begins, at, "right") - np.searchsorted(ends, at, "right")
