"""A decode step of one sequence against the memory's limit: `python -m bench.step_floor --work DIR`.

A step reads every weight once. Each step, scheduler and sampler included, is followed by a plain read of as many bytes
by the same threads; a pair's ratio is the step over the read. The models are Qwen2-0.5B's shape and the demo, bfloat16.
"""

import argparse
import csv
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open

import kernels.cpu
from bench.machine import describe
from bench.peers.compare import find_model
from engine.engine import Engine
from engine.request import EngineRequest
from pagewire.config import engine_options
from pagewire.sampling import SamplingParams

GOAL = 1.1
_PROMPT = tuple(range(1000, 1032))
_UNTIMED = 4


@dataclass(frozen=True, slots=True)
class Row:
    """Medians; `ratio` of the pairs, between `lowest` and `highest`."""

    model: str
    weight_mb: float
    step_ms: float
    read_ms: float
    read_gb_per_s: float
    ratio: float
    lowest: float
    highest: float
    goal: float = GOAL


def weight_bytes(model: Path) -> int:
    """What a step reads: all matrices, but not an embedding of which it takes a row only."""
    tied = json.loads((model / "config.json").read_text()).get("tie_word_embeddings", True)
    total = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  not a dictionary
                if tied or "embed_tokens" not in name:
                    total += 2 * prod(file.get_slice(name).get_shape())
    return total


def pairs(engine: Engine, num_bytes: int, count: int) -> Iterator[tuple[float, float]]:
    """(a step's seconds, the seconds of a read of as many bytes)."""
    read = kernels.cpu.load().module.read
    buffer = torch.ones(num_bytes, dtype=torch.uint8)
    params = SamplingParams(temperature=0.0, max_tokens=count + _UNTIMED, ignore_eos=True, seed=1)
    engine.add(EngineRequest("r", _PROMPT, params))
    for number in range(count + _UNTIMED):
        started = time.perf_counter()
        engine.step()
        between = time.perf_counter()
        read(buffer.data_ptr(), num_bytes)
        if number >= _UNTIMED:
            yield between - started, time.perf_counter() - between
    engine.kv_cache.take_events()


def measure(model: Path, count: int, threads: int) -> Row:
    num_bytes = weight_bytes(model)
    options = {"dtype": "bfloat16", "max_model_len": 512, "kernels": "native"}
    if threads:
        options["cpu_threads"] = threads
    engine = Engine(engine_options(model=str(model), **options))
    try:
        steps, reads = zip(*pairs(engine, num_bytes, count), strict=True)
    finally:
        engine.close()
    ratios = sorted(step / read for step, read in zip(steps, reads, strict=True))
    step, read = statistics.median(steps), statistics.median(reads)
    return Row(
        model.name, num_bytes / 1e6, step * 1e3, read * 1e3, num_bytes / read / 1e9,
        statistics.median(ratios), ratios[0], ratios[-1],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(".peers"), help="for the models")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--threads", type=int, default=0, help="default: as a worker")
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    machine = describe()
    given.work.mkdir(parents=True, exist_ok=True)
    rows = [measure(find_model(name, given.work), given.pairs, given.threads) for name in ("qwen", "demo")]
    for row in rows:
        print(
            f"{row.model}: a step of {row.step_ms:.1f} ms for {row.weight_mb:.0f} MB, a read of {row.read_ms:.1f} ms "
            f"({row.read_gb_per_s:.1f} GB/s): {row.ratio:.2f}x ({row.lowest:.2f} … {row.highest:.2f}), goal {GOAL}x"
        )
    if given.csv:
        with given.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*asdict(rows[0]), *machine])
            for row in rows:
                values = (f"{value:.4g}" if isinstance(value, float) else value for value in asdict(row).values())
                writer.writerow([*values, *machine.values()])


if __name__ == "__main__":
    main()
