"""Times decode attention over long contexts, and the write of a step's KV, with one byte a value against bfloat16.

    .venv/bin/python bench/quantization_kv.py --out FILE

One layer, one new token of one sequence, native kernels on one thread, its CPU time, in interleaved rounds of one run;
for each instruction set of this machine. `ratio` is the median of bfloat16's time over the format's own within a round:
above 1 is faster than bfloat16. Other load on the machine shows in the spread of the ratios.
"""

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kernels.cpu
from bench.machine import processor
from engine.memory import KvLayout, KvMemory
from kernels.cpu.native import NativeKernels
from kernels.kv_cells import KvFormat
from kernels.paged import PagedBatch

BLOCK = 16
FORMATS: tuple[KvFormat | None, ...] = (None, "int8", "fp8_e4m3")
WORK_VALUES = 20_000_000
"""Keys that a measurement reads at least: some milliseconds."""


@dataclass(frozen=True, slots=True)
class Shape:
    model: str
    group: int
    kv_heads: int
    head_dim: int
    context: int


SHAPES = (
    Shape("Llama 3 8B", 4, 8, 128, 2048),
    Shape("Llama 3 8B", 4, 8, 128, 32768),
    Shape("Qwen2.5 0.5B", 7, 2, 64, 32768),
    Shape("a model without grouped heads", 1, 8, 64, 16384),
    Shape("Gemma 3 270M", 4, 1, 256, 32768),
)


@dataclass(frozen=True, slots=True)
class Point:
    hardware: str
    load: float
    rounds: int
    isa: str
    model: str
    op: str
    context: int
    kv: str
    microseconds: float
    ratio: float
    ratio_low: float
    ratio_high: float


def prepare(native: NativeKernels, shape: Shape, kv_format: KvFormat | None) -> dict[str, Callable[[], object]]:
    """The ops over a filled cache. Rows of several tokens are written, as in a prefill of 256."""
    num_blocks, heads, size = -(-shape.context // BLOCK), shape.kv_heads, shape.head_dim
    memory = KvMemory(KvLayout(1, heads, size, BLOCK, torch.bfloat16, kv_format), num_blocks)
    k_cache, v_cache = memory.layer(0)
    table, generator = list(range(num_blocks)), torch.Generator().manual_seed(1)

    def random(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, generator=generator).to(torch.bfloat16)

    for start in range(0, shape.context, 4096):
        end = min(start + 4096, shape.context)
        batch = PagedBatch.build([end - start], [end], [table], BLOCK)
        native.write_kv(random(end - start, heads, size), random(end - start, heads, size), k_cache, v_cache, batch)
    q = random(1, shape.group * heads, size)
    batch = PagedBatch.build([1], [shape.context], [table], BLOCK)
    plan = native.plan_attention(batch, group_size=shape.group, window=None)
    some = PagedBatch.build([256], [256], [table[:16]], BLOCK)
    qkv = random(256, (shape.group + 2) * heads * size)
    cos, sin = native.rope_tables(torch.arange(256), torch.ones(size // 2), 1.0)
    return {
        "attention of a token": lambda: native.paged_attention(q, k_cache, v_cache, plan, scale=size**-0.5),
        "rope and store of 256": lambda: native.rope_and_store(qkv, cos, sin, k_cache, v_cache, some),
    }


def measure(native: NativeKernels, shape: Shape, rounds: int) -> list[Point]:
    work = {kv_format: prepare(native, shape, kv_format) for kv_format in FORMATS}
    count = max(1, WORK_VALUES // (shape.kv_heads * shape.head_dim * shape.context))
    made = []
    for op in work[None]:
        times: dict[KvFormat | None, list[float]] = {kv_format: [] for kv_format in FORMATS}
        for _ in range(rounds):
            for kv_format in FORMATS:
                began = time.thread_time()
                for _ in range(count):
                    work[kv_format][op]()
                times[kv_format].append((time.thread_time() - began) / count)
        for kv_format in FORMATS:
            ratios = sorted(plain / own for plain, own in zip(times[None], times[kv_format], strict=True))
            made.append(
                Point(
                    processor(), os.getloadavg()[0], rounds, native.isa, shape.model, op, shape.context,
                    kv_format or "bfloat16", statistics.median(times[kv_format]) * 1e6,
                    statistics.median(ratios), ratios[0], ratios[-1],
                )
            )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--isas", nargs="+", help="default: all that run here, emulated ones excepted")
    parser.add_argument("--out", type=Path, help="write a CSV")
    options = parser.parse_args()
    extension = kernels.cpu.load()
    extension.configure_threads(1)
    here = [name for name, obstacle, emulated in extension.module.isas() if not obstacle and not emulated]
    made = []
    for isa in options.isas or here:
        extension.module.use(isa)
        native = NativeKernels(kernels.cpu.Extension(extension.module, isa))
        for shape in SHAPES:
            for p in measure(native, shape, options.rounds):
                made.append(p)
                spread = f"{p.ratio_low:.2f}-{p.ratio_high:.2f}"
                print(
                    f"{p.isa:<12} {p.model:<30} {p.op:<22} {p.context:>6} {p.kv:<9} {p.microseconds:>9.0f} us "
                    f"{p.ratio:>5.2f}x ({spread})",
                    flush=True,
                )
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([field.name for field in fields(Point)])
            writer.writerows(astuple(point) for point in made)


if __name__ == "__main__":
    main()
