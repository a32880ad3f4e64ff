"""Times one call beside others that do the same, in interleaved pairs."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SPIN_SECONDS = 0.02  # OpenMP's threads spin for some milliseconds after a product


@dataclass(frozen=True, slots=True)
class Point:
    op: str
    dtype: str
    rows: int
    peer: str
    native_us: float
    other_us: float
    ratio: float
    ratio_low: float
    ratio_high: float
    gigabytes_per_second: float
    gigaflops: float
    floor: float


@dataclass(frozen=True, slots=True)
class Bench:
    """How to time. `bandwidth` in bytes per second; `clock` the wall's, or this thread's CPU time."""

    pairs: int
    bandwidth: float
    clock: Callable[[], float]


def timed(clock: Callable[[], float], call: Callable[[int], object], count: int) -> float:
    """Seconds per call of call(0), call(1) ...

    The other's threads have stopped spinning by then, and one untimed call has woken this one's.
    """
    time.sleep(SPIN_SECONDS)
    call(0)
    start = clock()
    for index in range(count):
        call(index)
    return (clock() - start) / count


def compare(
    bench: Bench, op: str, dtype: str, rows: int,
    native: Callable[[int], object], peers: Mapping[str, Callable[[int], object]], *, num_bytes: int, flops: int,
) -> Point:  # fmt: skip
    """`pairs` interleaved pairs of native and the fastest of its peers, each long enough to time."""
    once = max(timed(bench.clock, native, 1), timed(bench.clock, native, 1), 1e-6)
    tried = {name: (timed(bench.clock, call, 1), timed(bench.clock, call, 3))[1] for name, call in peers.items()}
    peer = min(tried, key=tried.__getitem__)
    other = peers[peer]
    count = max(1, min(200, int(0.03 / once)))
    natives, others = [], []
    for _ in range(bench.pairs):
        natives.append(timed(bench.clock, native, count))
        others.append(timed(bench.clock, other, max(1, count // 2)))
    ratios = sorted(o / n for n, o in zip(natives, others, strict=True))
    best = statistics.median(natives)
    return Point(
        op, dtype, rows, peer, best * 1e6, statistics.median(others) * 1e6,
        statistics.median(ratios), ratios[0], ratios[-1],
        num_bytes / best / 1e9, flops / best / 1e9, best / (num_bytes / bench.bandwidth),
    )  # fmt: skip
