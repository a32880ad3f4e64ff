"""What systems are asked, and the numbers that come of it: milliseconds and tokens per second."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from pagewire.benchmark.backend import Backend
from pagewire.benchmark.datasets import Sample
from pagewire.benchmark.load import Load, send
from pagewire.benchmark.outcome import Outcome

Numbers = dict[str, float]
_TOKEN_IDS = (1_000, 32_000)  # of words, in every vocabulary that is compared


class LoadFailed(Exception):
    """A request failed: nothing that was measured beside it counts."""


def _sample(num_in: int, num_out: int) -> Sample:
    """A prompt that nobody has seen."""
    return Sample(tuple(random.randrange(*_TOKEN_IDS) for _ in range(num_in)), num_out)


def _clock() -> Callable[[], float]:
    started = time.perf_counter()
    return lambda: time.perf_counter() - started


def _check(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if not outcome.is_good:
            raise LoadFailed(f"{outcome.code}: {outcome.error}")


def _ms(seconds: Sequence[float], percentile: float) -> float:
    return 1e3 * float(np.percentile(seconds, percentile)) if len(seconds) else float("nan")


async def streams(backend: Backend, num_streams: int, num_requests: int, num_in: int, num_out: int) -> Numbers:
    """So many requests, `num_streams` of them at a time."""
    clock = _clock()
    samples = [_sample(num_in, num_out) for _ in range(num_requests)]
    load = Load(backend, samples, [0.0] * num_requests, max_concurrency=num_streams, clock=clock)
    await load.run()
    elapsed, outcomes = clock(), load.outcomes
    _check(outcomes)
    gaps = [gap for outcome in outcomes for gap in outcome.itls]
    return {
        "tok/s": sum(outcome.num_output_tokens for outcome in outcomes) / elapsed,
        "ttft_ms": _ms([outcome.ttft for outcome in outcomes if outcome.ttft is not None], 50),
        "itl_ms": _ms(gaps, 50),
    }


@dataclass(frozen=True, slots=True)
class Interference:
    """Streams run all the time; after `lead` seconds long prompts come, and short requests in between.

    0 ── lead ──┬────────┬────────┬──── seconds
                long     long     long             every `every` seconds
                  s  s  s  s  s  s  s  s           every `short_every` seconds

    A system that can't keep up shows it in `backlog_ms` (at least 1): how long after the end the last prompt has its
    answer.
    """

    num_streams: int = 4
    stream: tuple[int, int] = (128, 256)
    long: tuple[int, int] = (2048, 8)
    short: tuple[int, int] = (64, 8)
    every: float = 8.0
    num_longs: int = 3

    @property
    def short_every(self) -> float:
        return self.every / 4

    @property
    def lead(self) -> float:
        return self.every / 2

    @property
    def seconds(self) -> float:
        return self.num_longs * self.every


@dataclass(slots=True)
class _Seen:
    streams: list[Outcome] = field(default_factory=list)
    longs: list[Outcome] = field(default_factory=list)
    shorts: list[Outcome] = field(default_factory=list)


async def interfere(backend: Backend, plan: Interference) -> Numbers:
    """Gaps between the streams' tokens, and first tokens of the others, from the first long prompt on."""
    clock, seen, is_over = _clock(), _Seen(), asyncio.Event()
    begin, end = plan.lead, plan.lead + plan.seconds

    async def one(shape: tuple[int, int], into: list[Outcome]) -> None:
        outcome = Outcome(clock(), clock())
        into.append(outcome)
        await send(backend, _sample(*shape), f"bench-{id(outcome)}", outcome, clock)

    async def stream() -> None:
        while not is_over.is_set():
            await one(plan.stream, seen.streams)

    async def arrive(shape: tuple[int, int], into: list[Outcome], first: float, every: float) -> None:
        async with asyncio.TaskGroup() as group:
            due = first
            while due < end:
                await asyncio.sleep(max(0.0, due - clock()))
                group.create_task(one(shape, into))
                due += every

    running = [asyncio.create_task(stream()) for _ in range(plan.num_streams)]
    try:
        await asyncio.gather(
            arrive(plan.long, seen.longs, begin, plan.every),
            arrive(plan.short, seen.shorts, begin + plan.short_every / 2, plan.short_every),
            asyncio.sleep(end),
        )
    finally:
        is_over.set()
        for task in running:
            task.cancel()  # the streams' last requests have no end of their own
        await asyncio.gather(*running, return_exceptions=True)
    _check([*seen.longs, *seen.shorts, *(outcome for outcome in seen.streams if outcome.ended_at)])
    last = max(outcome.ended_at for outcome in (*seen.longs, *seen.shorts))
    moments = [outcome.token_times for outcome in seen.streams]
    gaps = [b - a for times in moments for a, b in pairwise(times) if begin <= b < end]
    return {
        "itl_p50_ms": _ms(gaps, 50),
        "itl_p99_ms": _ms(gaps, 99),
        "itl_max_ms": _ms(gaps, 100),
        "streams_tok/s": sum(begin <= moment < end for times in moments for moment in times) / plan.seconds,
        "short_ttft_ms": _ms([outcome.ttft for outcome in seen.shorts if outcome.ttft is not None], 50),
        "short_ttft_max_ms": _ms([outcome.ttft for outcome in seen.shorts if outcome.ttft is not None], 100),
        "long_ttft_ms": _ms([outcome.ttft for outcome in seen.longs if outcome.ttft is not None], 50),
        "backlog_ms": max(1.0, 1e3 * (last - end)),
    }
