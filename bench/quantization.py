"""Times engine steps with quantized weights against float32 and bfloat16 ones, in interleaved rounds of one run.

    .venv/bin/python bench/quantization.py --model .cache/models/gemma-3-270m --out FILE

A round runs every variant once: a decode step of 1, 8 and 32 sequences (scheduler and sampler included) and a prefill
of 512 tokens. A point is a variant's median over the rounds; `ratio` the median of the baseline's time over its own
within a round, so above 1 is faster than bfloat16. Other load on the machine shows in the spread of the ratios; with
`--cpu-time` one thread computes and its CPU time counts, so that load matters less (shared bandwidth still does).
`bytes_ratio` is how many times fewer bytes of weights a step reads than with bfloat16.

Variants are bfloat16 or float32, then "+int8", "+w8a8" or a format of quantized_copies.py, whose copies have the output
matrix in bfloat16, with "+head" quantized too. Each file given with --gguf is measured as it is, under its name.
"""

import argparse
import csv
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.machine import processor
from bench.quantized_copies import FORMATS, quantized_copy
from engine.engine import Engine
from engine.gguf import packed_directory
from engine.request import EngineRequest
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams

Clock = Callable[[], float]

BASELINE = "bfloat16"
VARIANTS = ("bfloat16", "float32", "bfloat16+int8", "bfloat16+w8a8", "bfloat16+w4a16", "bfloat16+w4a16+head")
DECODES = {1: 12, 8: 6, 32: 3}  # sequences: steps
PREFILL_TOKENS = 512
PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Point:
    hardware: str
    threads: int
    clock: str
    load: float
    rounds: int
    variant: str
    numerics_class: str
    work: str
    milliseconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    bytes_ratio: float


def make_engine(model: str, variant: str, threads: int, scratch: Path, files: dict[str, Path]) -> Engine:
    dtype, _, quantization = variant.partition("+")
    if quantization in files:
        model, quantization = str(packed_directory(files[quantization], dtype=dtype)), "none"
    name, _, head = quantization.partition("+")
    if name in FORMATS:
        model = str(quantized_copy(Path(model), scratch / quantization, name, head=bool(head)))
        quantization = "none"
    fields = {"dtype": dtype, "quantization": quantization or "none", "cpu_threads": threads, "kernels": "native"}
    limits = {"max_model_len": 640, "max_num_batched_tokens": PREFILL_TOKENS, "kv_cache_memory_bytes": 256 << 20}
    return Engine(EngineOptions.model_validate({"model": model, "enable_prefix_caching": False} | fields | limits))


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    engine.kv_cache.take_events()


def decode_seconds(engine: Engine, clock: Clock, num_sequences: int, num_steps: int) -> float:
    """A decode step of that many sequences."""
    params = SamplingParams(temperature=0.0, max_tokens=num_steps + 2, ignore_eos=True, seed=1)
    for number in range(num_sequences):
        prompt = tuple(range(10 + number, 10 + number + PROMPT_TOKENS))
        engine.add(EngineRequest(f"r{number}", prompt, params))
    while not engine.step().tokens:
        pass
    began = clock()
    for _ in range(num_steps):
        engine.step()
    seconds = (clock() - began) / num_steps
    drain(engine)
    return seconds


def prefill_seconds(engine: Engine, clock: Clock) -> float:
    """A prompt of PREFILL_TOKENS, its first token included."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=1)
    engine.add(EngineRequest("r", tuple(range(10, 10 + PREFILL_TOKENS)), params))
    began = clock()
    drain(engine)
    return clock() - began


def measure(engine: Engine, clock: Clock, quick: bool) -> dict[str, float]:
    """Seconds of each kind of work; `quick`: of decode steps of one sequence and of eight."""
    counts = [count for count in DECODES if not quick or count <= 8]
    times = {f"decode {count}": decode_seconds(engine, clock, count, DECODES[count]) for count in counts}
    return times if quick else times | {f"prefill {PREFILL_TOKENS}": prefill_seconds(engine, clock)}


def bytes_read(engine: Engine) -> int:
    """Of the weights, by a decode step of one sequence."""
    return engine._runner._model.num_bytes_read  # type: ignore[attr-defined]


def points(
    rounds: Sequence[dict[str, dict[str, float]]], engines: dict[str, Engine], threads: int, clock: str
) -> list[Point]:
    made = []
    for variant, engine in engines.items():
        for work in rounds[0][variant]:
            times = [each[variant][work] for each in rounds]
            ratios = sorted(each[BASELINE][work] / each[variant][work] for each in rounds)
            made.append(
                Point(
                    processor(), threads, clock, os.getloadavg()[0], len(rounds), variant, engine.numerics_class, work,
                    statistics.median(times) * 1e3, statistics.median(ratios), ratios[0], ratios[-1],
                    bytes_read(engines[BASELINE]) / bytes_read(engine),
                )
            )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gguf", type=Path, nargs="+", default=[], help="the same model as GGUF files")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="decode of 1 and 8 sequences only")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--variants",
        nargs="+",
        default=VARIANTS,
        help=f"{BASELINE} is always among them; formats: {', '.join(FORMATS)}",
    )
    parser.add_argument("--out", type=Path, help="write a CSV")
    parser.add_argument("--cpu-time", action="store_true", help="one thread's CPU time")
    options = parser.parse_args()
    threads = 1 if options.cpu_time else options.threads
    clock = time.thread_time if options.cpu_time else time.perf_counter
    files = {file.stem: file for file in options.gguf}
    variants = dict.fromkeys([BASELINE, *options.variants, *(f"bfloat16+{name}" for name in files)])
    with tempfile.TemporaryDirectory() as scratch:
        engines = {variant: make_engine(options.model, variant, threads, Path(scratch), files) for variant in variants}
    for engine in engines.values():
        decode_seconds(engine, clock, 1, 1)
    rounds = []
    for number in range(options.rounds):
        rounds.append({variant: measure(engine, clock, options.quick) for variant, engine in engines.items()})
        print(f"round {number + 1} of {options.rounds}, load {os.getloadavg()[0]:.1f}", flush=True)
    made = points(rounds, engines, threads, "CPU" if options.cpu_time else "wall")
    print(f"{processor()}, {threads} threads, {made[0].clock} time, load {made[0].load:.1f}, {options.rounds} rounds")
    for p in made:
        spread = f"{p.ratio:>5.2f}x ({p.ratio_low:.2f}-{p.ratio_high:.2f}), bytes {p.bytes_ratio:.2f}x"
        print(f"{p.variant:<26}{p.work:<12}{p.milliseconds:>9.1f} ms  {spread}")
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([field.name for field in fields(Point)])
            writer.writerows(astuple(point) for point in made)
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
