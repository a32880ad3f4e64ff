"""Decode steps against context length and batch: `python -m bench.context_growth [--csv FILE] [--plot FILE]`.

A sequence's context is put under it as a transfer would (`AdoptedKv`), filled with random values: nothing is prefilled.
A step reads the weights and every sequence's KV, so its time should grow in line with those bytes, without a knee.
"""

import argparse
import csv
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from bench.machine import describe
from engine.engine import Engine
from engine.model_config import load_model_config
from engine.request import AdoptedKv, EngineRequest
from pagewire.config import engine_options
from pagewire.sampling import SamplingParams

CONTEXTS = (1024, 2048, 4096, 8192, 16384)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
GRID = [*((batch, context) for batch in (1, 8) for context in CONTEXTS),
        *((batch, 1024) for batch in BATCHES if batch not in (1, 8))]  # fmt: skip
_STEPS = 8
_MOST_TOKENS = 8 * 16384
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Row:
    """Median of all rounds' steps; `kv_mb` is what the step reads of the cache, 10^6 bytes."""

    batch: int
    context: int
    kv_mb: float
    step_ms: float
    lowest: float
    highest: float


def load(model: Path) -> Engine:
    """An engine with room for the largest point, its pool full of random values."""
    room = _MOST_TOKENS + 64 * 4 * _BLOCK
    engine = Engine(
        engine_options(model=str(model), dtype="bfloat16", block_size=_BLOCK, max_model_len=CONTEXTS[-1] + 64,
                       max_num_seqs=64, kv_cache_memory_bytes=room * kv_bytes_per_token(model))
    )  # fmt: skip
    blocks = engine.memory.blocks
    pattern = torch.randn(blocks[:256].shape, generator=torch.Generator().manual_seed(0)).to(blocks.dtype)
    for start in range(0, len(blocks), len(pattern)):
        part = blocks[start : start + len(pattern)]
        part.copy_(pattern[: len(part)])
    return engine


def kv_bytes_per_token(model: Path) -> int:
    """Of a bfloat16 cache."""
    config = load_model_config(model)
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2


def step_seconds(engine: Engine, batch: int, context: int) -> list[float]:
    """Of `_STEPS` steps in which every sequence has its context and draws a token."""
    params = SamplingParams(temperature=0.0, max_tokens=_STEPS + 4, ignore_eos=True, seed=1)
    for number in range(batch):
        prompt = tuple(random.randrange(1000, 32000) for _ in range(context))
        blocks = engine.kv_cache.allocate(engine.kv_cache.num_blocks_for(context))
        assert blocks is not None
        adopted = AdoptedKv(tuple(blocks), context)
        engine.add(EngineRequest(f"r{number}", prompt, params, adopted=adopted))
    seconds: list[float] = []
    while engine.has_work:
        started = time.perf_counter()
        output = engine.step()
        elapsed = time.perf_counter() - started
        if len(output.tokens) == batch and len(seconds) < _STEPS + 1:
            seconds.append(elapsed)
    engine.kv_cache.take_events()
    return seconds[1:]  # the first computes the prompts' last tokens


def fit(rows: Sequence[Row]) -> tuple[float, float, float]:
    """Of the rows of one batch: (ms without KV, GB/s at which KV is read, largest deviation from the line)."""
    kv, ms = np.array([row.kv_mb for row in rows]), np.array([row.step_ms for row in rows])
    slope, base = np.polyfit(kv, ms, 1)
    return float(base), 1 / float(slope), float(np.max(np.abs(base + slope * kv - ms) / ms))


def plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Left: against the bytes of KV, a line for each batch. Right: against the batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_bytes, by_batch) = pyplot.subplots(1, 2, figsize=(11, 4))
    for batch in (1, 8):
        some = [row for row in rows if row.batch == batch]
        base, rate, _ = fit(some)
        kv = np.array([row.kv_mb for row in some])
        (line,) = by_bytes.plot(kv, [row.step_ms for row in some], "o", label=f"batch {batch}, 1k … 16k")
        by_bytes.plot(kv, base + kv / rate, "-", color=line.get_color(), linewidth=0.8, label=f"{rate:.1f} GB/s")
    by_bytes.set_xlabel("KV that a step reads, MB")
    some = sorted((row for row in rows if row.context == 1024), key=lambda row: row.batch)
    by_batch.plot([row.batch for row in some], [row.step_ms for row in some], "o-", label="context 1024")
    by_batch.set_xlabel("batch")
    for axes in (by_bytes, by_batch):
        axes.set_ylabel("decode step, ms")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model directory; default: Qwen2-0.5B's shape, made on the spot")
    parser.add_argument("--rounds", type=int, default=3, help="all points, by turns")
    parser.add_argument("--work", type=Path, default=Path(".peers"), help="for the model")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    machine = describe()
    model = given.model
    if model is None:
        from bench.peers.model import make_qwen2_shape

        given.work.mkdir(parents=True, exist_ok=True)
        model = make_qwen2_shape(given.work / "qwen2-0.5b-shape")
    engine = load(model)
    step_seconds(engine, 8, 1024)
    found: dict[tuple[int, int], list[float]] = {}
    for _ in range(given.rounds):
        for batch, context in GRID:
            found.setdefault((batch, context), []).extend(step_seconds(engine, batch, context))
    per_token = kv_bytes_per_token(model)
    engine.close()
    rows = []
    for (batch, context), seconds in found.items():
        numbers = (1e3 * value for value in (statistics.median(seconds), min(seconds), max(seconds)))
        row = Row(batch, context, batch * context * per_token / 1e6, *numbers)
        rows.append(row)
        print(f"batch {batch:3d}, context {context:6d}: {row.step_ms:7.1f} ms, {row.kv_mb:7.0f} MB of KV")
    for batch in (1, 8):
        base, rate, deviation = fit([row for row in rows if row.batch == batch])
        print(f"batch {batch}: {base:.1f} ms + KV at {rate:.1f} GB/s, off the line by at most {deviation:.0%}")
    if given.csv:
        with given.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*asdict(rows[0]), *machine], lineterminator="\n")
            writer.writeheader()
            writer.writerows({**{k: f"{v:.4g}" for k, v in asdict(row).items()}, **machine} for row in rows)
    if given.plot:
        plot(given.plot, rows, f"{model.name}, bfloat16, {machine['hardware']}, {machine['cpus']} CPUs")


if __name__ == "__main__":
    main()
