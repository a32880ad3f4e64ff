"""What is measured of an engine, and the loop that measures on command. Plain Python: peers' environments run it too.

An engine process reads a point's name per line from stdin and answers on stdout with `POINT <value>`;
`bench.peers.compare` starts one for each side and asks them by turns.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

# Answers each prompt (token ids) with exactly so many tokens, greedily, all prompts at once.
Generate = Callable[[Sequence[list[int]], int], object]

READY, POINT = "READY", "POINT"
_TOKEN_IDS = (1_000, 32_000)  # of words, in every vocabulary that is compared
_SHORT = 32
_LONG = 65
_REPEATS = 3


class Points:
    """The points of one engine. Every prompt is random, so that no cache helps but where it is asked for."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._random = random.Random(time.time_ns())

    def warm_up(self) -> None:
        """Every shape that is measured ran once."""
        for count, length, out in ((1, 64, 8), (8, _SHORT, 4), (1, 512, 2), (32, _SHORT, 2)):
            self._seconds(self._prompts(count, length), out)

    def measure(self, name: str) -> float:
        """A point's value in the unit that its name ends with."""
        kind, *numbers = name.split("_")
        if kind == "decode":  # decode_b8_ms
            return self._decode_step(int(numbers[0][1:])) * 1e3
        if kind == "prefill":  # prefill_4x512_tok/s
            count, length = map(int, numbers[0].split("x"))
            return count * length / self._seconds(self._prompts(count, length), 1)
        if kind == "mixed":  # mixed_16x256+64_tok/s
            shape, out = numbers[0].split("+")
            count, length = map(int, shape.split("x"))
            return count * int(out) / self._seconds(self._prompts(count, length), int(out))
        if kind == "warm":  # warm_1024_ms
            prompts = self._prompts(1, int(numbers[0]))
            self._seconds(prompts, 1)
            return statistics.median(self._seconds(prompts, 1) for _ in range(_REPEATS)) * 1e3
        if kind == "burst":  # burst_16x1024+16_ms: prompts that begin alike come together, what they begin with is new
            shape, own = numbers[0].split("+")
            count, length = map(int, shape.split("x"))
            (common,) = self._prompts(1, length)
            return self._seconds([common + tail for tail in self._prompts(count, int(own))], 1) * 1e3
        raise ValueError(f"point: {name!r} is none of decode, prefill, mixed, warm, burst")

    def _decode_step(self, batch: int) -> float:
        """The difference between many tokens and one, per step."""
        many = self._seconds(self._prompts(batch, _SHORT), _LONG)
        return (many - self._seconds(self._prompts(batch, _SHORT), 1)) / (_LONG - 1)

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        return [[self._random.randrange(*_TOKEN_IDS) for _ in range(length)] for _ in range(count)]

    def _seconds(self, prompts: Sequence[list[int]], num_tokens: int) -> float:
        started = time.perf_counter()
        self._generate(prompts, num_tokens)
        return time.perf_counter() - started


def serve(points: Points, seconds_to_start: float) -> None:
    """Answers commands until stdin ends."""
    points.warm_up()
    print(READY, seconds_to_start, flush=True)
    for line in sys.stdin:
        print(POINT, points.measure(line.strip()), flush=True)
