"""Where an engine step's time goes: each native op by its shape, and what is left for scheduler, sampler and Python.

    .venv/bin/python bench/op_profile.py --quantization w8a8 --out FILE

A decode step of 1, 8 and 32 sequences and a prefill of 1 x 1024 tokens, on Qwen2-0.5B's shape with random weights (or
--model). Steps that run from a record (engine/step_replay.py) have one op, "recorded". With --enforce-eager none do:
the ops are timed one by one, so the steps are some microseconds an op slower than without.
"""

import argparse
import csv
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kernels.cpu
from bench.machine import processor
from bench.peers.model import make_qwen2_shape
from engine.engine import Engine
from engine.request import EngineRequest
from kernels.cpu import Extension
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams

PREFILL = 1024
SHAPES = {"linear": slice(10, 12), "linear_int8": slice(11, 13), "linear_grouped": slice(15, 17)}  # n_out and k


class TimedModule:
    """The extension with its calls timed: seconds by op, a product's by its shape too."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.seconds: dict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._module, name)
        if name == "Program":
            return lambda *arguments: TimedProgram(call(*arguments), self.seconds)
        if not callable(call) or isinstance(call, type):
            return call

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = call(*arguments)
            shape = arguments[SHAPES[name]] if name in SHAPES else ()
            self.seconds[" x ".join([name, *map(str, shape)])] += time.perf_counter() - started
            return result

        setattr(self, name, timed)
        return timed


class TimedProgram:
    """A record whose runs are timed."""

    def __init__(self, program: Any, seconds: dict[str, float]) -> None:
        self.begin, self.end = program.begin, program.end
        self._program = program
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self._program)

    def run(self, *arguments: Any) -> None:
        started = time.perf_counter()
        self._program.run(*arguments)
        self._seconds["recorded"] += time.perf_counter() - started


def run_steps(engine: Engine, num_sequences: int, num_tokens: int, max_tokens: int) -> Iterator[float]:
    """Seconds of each step until all is done."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=1)
    for number in range(num_sequences):
        prompt = tuple(1000 + (number * 7919 + 31 * i) % 30000 for i in range(num_tokens))
        engine.add(EngineRequest(f"r{number}", prompt, params))
    while engine.has_work:
        started = time.perf_counter()
        engine.step()
        yield time.perf_counter() - started
    engine.kv_cache.take_events()


def profile(engine: Engine, timed: TimedModule, work: str, steps: int) -> Iterator[tuple[str, str, float]]:
    """(work, op, milliseconds a step), the greatest first."""
    kind, number = work.split()
    seconds, ops = [], []
    for _ in range(steps if kind == "prefill" else 1):
        sequences, tokens, out = (1, int(number), 1) if kind == "prefill" else (int(number), 32, steps + 2)
        before = dict(timed.seconds)
        for took in run_steps(engine, sequences, tokens, out):
            seconds.append(took)
            ops.append({op: total - before.get(op, 0.0) for op, total in timed.seconds.items()})
            before = dict(timed.seconds)
    if kind == "decode":
        seconds, ops = seconds[-steps:-1], ops[-steps:-1]
    step = statistics.median(seconds)
    medians = {op: statistics.median(each.get(op, 0.0) for each in ops) for op in ops[-1]}
    yield work, "the step", step * 1e3
    for op, took in sorted(medians.items(), key=lambda item: -item[1]):
        if took:
            yield work, op, took * 1e3
    yield work, "between the ops", (step - sum(medians.values())) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--work", nargs="+", default=["decode 1", "decode 8", "decode 32", f"prefill {PREFILL}"])
    parser.add_argument("--out", type=Path, help="write a CSV")
    options = parser.parse_args()
    found = kernels.cpu.load()
    timed = TimedModule(found.module)
    kernels.cpu.load = lambda: Extension(timed, found.isa)
    model = options.model or make_qwen2_shape(Path("/tmp/pagewire-qwen2-shape"))
    fields = {"dtype": "bfloat16", "quantization": options.quantization, "cpu_threads": options.threads}
    limits = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 512 << 20}
    fixed = {"model": str(model), "enable_prefix_caching": False, "kernels": "native"}
    fixed["enforce_eager"] = options.enforce_eager
    engine = Engine(EngineOptions.model_validate(fixed | fields | limits))
    list(run_steps(engine, 1, 64, 2))
    rows = [row for work in options.work for row in profile(engine, timed, work, options.steps)]
    print(f"{processor()}, {options.threads} threads, {engine.numerics_class}")
    for work, op, milliseconds in rows:
        print(f"{work:<14}{op:<34}{milliseconds:>9.2f} ms")
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["hardware", "threads", "numerics_class", "work", "op", "milliseconds"])
            writer.writerows((processor(), options.threads, engine.numerics_class, *row) for row in rows)
    engine.close()


if __name__ == "__main__":
    main()
