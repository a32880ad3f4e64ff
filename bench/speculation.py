"""Decode tokens a second with and without prompt lookup, one sequence, in interleaved pairs.

    .venv/bin/python bench/speculation.py --model .cache/models/gemma-3-270m --out FILE

Texts: one that repeats itself, code, and prose that does not. `ratio` is the median over pairs of the same text.
"""

import argparse
import csv
import os
import platform
import statistics
import sys
import time
from dataclasses import astuple, dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tokenizers import Tokenizer

from engine.engine import Engine
from engine.request import EngineRequest
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams

TEXTS = {
    "repeats": "The cat sat on the mat. The dog sat on the mat. The bird sat on the mat. " * 4,
    "code": "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return",
    "prose": "The history of the city of Rome begins with",
}


@dataclass(frozen=True, slots=True)
class Point:
    text: str
    tokens: int
    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    ratio: float
    acceptance: float
    tokens_per_step: float
    machine: str


def run(engine: Engine, prompt: list[int], num_tokens: int) -> tuple[float, list[int], list[tuple[int, int]], int]:
    """Decode tokens a second after the first token; the tokens; (drafted, accepted) of each draft; steps."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=1)
    engine.add(EngineRequest("r", tuple(prompt), params))
    tokens: list[int] = []
    drafts: list[tuple[int, int]] = []
    began, num_steps = 0.0, 0
    while engine.has_work:
        output = engine.step()
        if tokens:
            num_steps += 1
        elif output.tokens:
            began = time.perf_counter()
        tokens += [token.token_id for token in output.tokens]
        drafts += output.drafts
    engine.kv_cache.take_events()
    return (len(tokens) - 1) / (time.perf_counter() - began), tokens, drafts, num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--config", default='{"method": "ngram", "num_speculative_tokens": 4}')
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    base = EngineOptions(model=options.model, dtype="bfloat16", kv_cache_memory_bytes=64 << 20, max_model_len=1024)
    plain, speculative = Engine(base), Engine(base.model_copy(update={"speculative_config": options.config}))
    tokenizer = Tokenizer.from_file(str(Path(options.model) / "tokenizer.json"))
    machine = f"{os.cpu_count()} x {platform.processor() or platform.machine()}, {plain.numerics_class}"
    points = []
    for name, text in TEXTS.items():
        prompt = tokenizer.encode(text).ids
        rates: list[tuple[float, float]] = []
        drafts: list[tuple[int, int]] = []
        num_steps = 1
        for _ in range(options.pairs):
            slow, expected, _, _ = run(plain, prompt, options.tokens)
            fast, tokens, drafts, num_steps = run(speculative, prompt, options.tokens)
            if tokens != expected:
                sys.exit(f"{name}: speculation changed a token")
            rates.append((slow, fast))
        drafted = max(1, sum(count for count, _ in drafts))
        points.append(
            Point(
                name,
                options.tokens,
                statistics.median(slow for slow, _ in rates),
                statistics.median(fast for _, fast in rates),
                statistics.median(fast / slow for slow, fast in rates),
                sum(accepted for _, accepted in drafts) / drafted,
                (options.tokens - 1) / num_steps,
                machine,
            )
        )
        point = points[-1]
        print(
            f"{name:8s} {point.plain_tokens_per_second:6.1f} -> {point.speculative_tokens_per_second:6.1f} tokens/s, "
            f"ratio {point.ratio:4.2f}, {point.acceptance:4.0%} accepted, {point.tokens_per_step:.2f} tokens a step",
            flush=True,
        )
    plain.close()
    speculative.close()
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([field.name for field in fields(Point)])
            writer.writerows(astuple(point) for point in points)


if __name__ == "__main__":
    main()
