"""What a first token costs on a real system, from requests of the run itself: every other one, and not those compared.

    TTFT = r x (delay + step + tokens x token)      of a request that found its prefill worker idle

`delay` is all outside the worker's step (router, RPCs, the event loops), `step` what each step costs, `token` each
computed token. `r` is how much slower or faster than that it went: on a machine whose CPUs others use too it is wide,
and the simulation draws it from what was seen. Queues are not in it: who waits, and for whom, is simulated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from bench.routing.outcome import Sample


@dataclass(frozen=True, slots=True)
class Timed:
    """A real request: when it arrived and how long it took in all (seconds), where it was prefilled, what came out."""

    arrived: float
    seconds: float
    worker: str
    sample: Sample

    @property
    def num_computed(self) -> int:
        return self.sample.num_prompt_tokens - self.sample.num_hit_tokens


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. `slowness` are values of r, in no order."""

    delay: float
    step: float
    token: float
    slowness: tuple[float, ...]


def unqueued(requests: Sequence[Timed]) -> list[Timed]:
    """Those at whose arrival no other request waited for its first token at the same worker.

    Who came later does not matter: if it did, the slow ones, which more come after, would be missing.
    """
    busy_until: dict[str, float] = {}
    found = []
    for request in sorted(requests, key=lambda each: each.arrived):
        until = busy_until.get(request.worker, 0.0)
        if request.arrived >= until:
            found.append(request)
        busy_until[request.worker] = max(until, request.arrived + request.sample.ttft)
    return found


def seconds_per_token(requests: Sequence[Timed], num_tokens: int) -> float:
    """From first token to last, over `num_tokens`: the workers' own steps are shorter, for between them others run."""
    return mean(each.seconds - each.sample.ttft for each in requests) / num_tokens


def fit(requests: Sequence[Timed], mean_step_seconds: float, mean_step_tokens: float) -> Costs:
    """From requests that found their worker idle, and the mean of the workers' own steps (seconds, computed tokens).

    Slope and intercept are Theil and Sen's: medians, which a few late ones do not move. Raises ValueError if there are
    fewer than ten requests or all computed the same.
    """
    points = [(float(each.num_computed), each.sample.ttft) for each in requests]
    slopes = [(y - v) / (x - u) for x, y in points for u, v in points if x > u]
    if len(points) < 10 or not slopes:
        raise ValueError(f"{len(points)} requests, or all alike, are too few to tell what a token costs")
    token = max(0.0, median(slopes))
    intercept = max(1e-6, median(y - token * x for x, y in points))
    step = min(max(0.0, mean_step_seconds - token * mean_step_tokens), intercept)
    slowness = tuple(y / (intercept + token * x) for x, y in points)
    return Costs(intercept - step, step, token, slowness)
