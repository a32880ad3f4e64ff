"""Outcomes as plain data."""

from pagewire.benchmark.outcome import Outcome, Run


def outcome(sent_at: float, *token_times: float, code: str = "", queue: float = 0.0, num_tokens: int = 0) -> Outcome:
    """`token_times` are since it was sent."""
    times = [sent_at + time for time in token_times]
    return Outcome(
        sent_at - queue, sent_at, times, ended_at=times[-1] if times else sent_at + 0.5, num_prompt_tokens=7,
        num_output_tokens=num_tokens or len(times), num_cached_tokens=4, text="x", code=code, error=code and "no room",
    )  # fmt: skip


def run() -> Run:
    """Three good ones, one of them with a single token, and two failures, within 4 s."""
    outcomes = [
        outcome(0.0, 0.1, 0.2, 0.4),
        outcome(0.0, 0.2, queue=0.0),
        outcome(1.0, code="RESOURCE_EXHAUSTED"),
        outcome(2.0, 0.3, 0.5, 0.6, 0.9, 1.1, queue=1.5),
        outcome(2.0, 0.3, code="UNAVAILABLE"),
    ]
    return Run(outcomes, duration=4.0)
