"""Metrics, percentiles, goodput, peaks: against numbers worked out by hand, and against numpy."""

import numpy as np
import pytest

from pagewire.benchmark.goodput import num_that_meet, parse_goodput
from pagewire.benchmark.options import MetricName
from pagewire.benchmark.outcome import Outcome
from pagewire.benchmark.statistics import (
    peak_concurrency,
    running_over_time,
    seconds_of,
    summarize,
    tokens_over_time,
)
from pagewire.config import ConfigError
from tests.pagewire.benchmark.runs import outcome, run


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("ttft", [0.1, 0.2, 0.3]),
        ("tpot", [0.15, 0.2]),  # one token has none
        ("itl", [0.1, 0.2, 0.2, 0.1, 0.3, 0.2]),
        ("e2el", [0.4, 0.2, 1.1]),
        ("client_queue_time", [0.0, 0.0, 1.5]),
        ("e2el_including_client_queue", [0.4, 0.2, 2.6]),
    ],
)
def test_only_what_ended_well_counts(metric: MetricName, expected: list[float]) -> None:
    assert seconds_of(metric, run().outcomes) == pytest.approx(expected)


def test_tpot_counts_tokens_not_messages() -> None:
    """Two messages with 5 tokens: four gaps lie between them."""
    assert outcome(0.0, 0.1, 0.5, num_tokens=5).tpot == pytest.approx(0.1)


def test_without_tokens_there_is_no_first_one() -> None:
    silent = outcome(1.0)
    assert (silent.ttft, silent.tpot, silent.itls) == (None, None, [])
    assert silent.latency == 0.5


def test_summary_by_hand() -> None:
    summary = summarize([0.001, 0.002, 0.003, 0.006], [50, 90, 100])
    assert (summary.mean, summary.median) == pytest.approx((3.0, 2.5))
    assert summary.std == pytest.approx(np.sqrt((4 + 1 + 0 + 9) / 4))
    assert dict(summary.percentiles) == pytest.approx({50: 2.5, 90: 5.1, 100: 6.0})


def test_nothing_measured_is_zero() -> None:
    summary = summarize([], [99])
    assert (summary.mean, summary.std, summary.percentiles) == (0.0, 0.0, ((99, 0.0),))


@pytest.mark.parametrize(
    ("objectives", "expected"),
    [
        ({"ttft": 200.0}, 2),
        ({"ttft": 199.0}, 1),
        ({"tpot": 151.0}, 2),  # one token meets every TPOT
        ({"e2el": 400.0}, 2),
        ({"ttft": 200.0, "e2el": 300.0}, 1),
        ({"ttft": 1000.0, "tpot": 1000.0, "e2el": 2000.0}, 3),
    ],
)
def test_goodput_needs_every_objective(objectives: dict[str, float], expected: int) -> None:
    outcomes = [Outcome(0, 0, [0.1, 0.2, 0.4], 0.4, num_output_tokens=3), *run().outcomes[1:]]
    assert num_that_meet(outcomes, objectives) == expected


def test_goodput_text() -> None:
    assert parse_goodput(["ttft:200", "tpot:50.5", "e2el:0"]) == {"ttft": 200.0, "tpot": 50.5, "e2el": 0.0}
    for pair in ("itl:5", "ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "ttft:inf"):
        with pytest.raises(ConfigError, match=f"goodput = '{pair}'"):
            parse_goodput([pair])


def test_peak_and_course() -> None:
    outcomes = [outcome(0.0, 1.0), outcome(0.5, 0.5), outcome(1.0, 1.0), outcome(1.5, 0.1)]
    assert peak_concurrency(outcomes) == 2  # two end when the third begins
    assert running_over_time(outcomes, [0.0, 0.6, 1.0, 1.55, 3.0]).tolist() == [1, 2, 1, 2, 0]
    assert peak_concurrency([]) == 0


def test_tokens_over_time() -> None:
    """4 tokens in 2 messages count 2 each; buckets of half a second are per second."""
    outcomes = [outcome(0.0, 0.1, 0.7, num_tokens=4), outcome(0.0, 0.2)]
    assert tokens_over_time(outcomes, 0.5, 3).tolist() == [6.0, 4.0, 0.0]
    assert tokens_over_time(outcomes, 0.1, 2).sum() * 0.1 == pytest.approx(5)  # what comes later is in the last
