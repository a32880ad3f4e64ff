"""Goodput: requests that meet every objective. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence

from pagewire.benchmark.outcome import Outcome
from pagewire.config import ConfigError

OBJECTIVES = ("ttft", "tpot", "e2el")


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """`["ttft:200", "tpot:50"]` to milliseconds by name. Raises ConfigError."""
    objectives: dict[str, float] = {}
    for pair in pairs:
        name, separator, text = pair.partition(":")
        if not separator or name not in OBJECTIVES:
            raise ConfigError(f"goodput = {pair!r}: must be NAME:MILLISECONDS with NAME one of {', '.join(OBJECTIVES)}")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (0 <= value < math.inf):
            raise ConfigError(f"goodput = {pair!r}: the objective must be a number of milliseconds from 0 on")
        objectives[name] = value
    return objectives


def num_that_meet(outcomes: Iterable[Outcome], objectives: Mapping[str, float]) -> int:
    """Good outcomes with every objective (milliseconds) met; a missing TPOT (one token) counts as 0, as in vLLM."""
    return sum(outcome.is_good and _meets(outcome, objectives) for outcome in outcomes)


def _meets(outcome: Outcome, objectives: Mapping[str, float]) -> bool:
    seconds = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all((value := seconds[name]) is not None and 1e3 * value <= limit for name, limit in objectives.items())
