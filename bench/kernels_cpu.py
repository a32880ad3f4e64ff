"""Times the native CPU kernels against torch's, in interleaved pairs, and against the memory's measured bandwidth.

    .venv/bin/python bench/kernels_cpu.py --quick         a minute, prints a table
    .venv/bin/python bench/kernels_cpu.py --out FILE      more pairs, and a CSV
    .venv/bin/python bench/kernels_cpu.py --cpu-time      one thread, its CPU time: for a machine with other load

A ratio above 1 means that native is faster. A product's peer is the fastest at its shape (`peer`) of oneDNN and MKL
with weights that they packed ahead and torch's own; for bfloat16 the same in float32 counts too, which processors
without instructions for bfloat16 compute faster. int8 (weights only, and activations too) goes against native bfloat16,
attention and the small ops (bench/small_ops.py) against torch. `floor` is the time over bytes / bandwidth (1.0: at the
memory's limit); it means something where few rows are computed. Other load on the machine shows in the spread of the
ratios. ONEDNN_VERBOSE=1 shows what oneDNN runs.
"""

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, fields
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kernels.cpu
from bench.machine import processor
from bench.paired_calls import Bench, Point, compare, timed
from bench.small_ops import small_points
from kernels.cpu import Extension
from kernels.cpu.attention import NativePlan
from kernels.cpu.native import NativeKernels
from kernels.cpu.packed import PackedWeight
from kernels.cpu.spaced_rows import spaced_rows
from kernels.paged import AttentionPlan, PagedBatch, plan_attention
from kernels.tiled import TiledKernels

COLD_BYTES = 128 << 20  # weights cycled through, so that none is still in a cache
MOST_WIDENED = 1 << 16  # rows of a bfloat16 weight that is tried in float32 too: more are too many bytes

OPS = ("linear", "attention", "small")
LINEARS = {  # name: (out, in) of Qwen2-0.5B and Gemma 3 270M
    "qwen qkv": (1152, 896),
    "qwen o": (896, 896),
    "qwen gate_up": (9728, 896),
    "qwen down": (896, 4864),
    "qwen lm_head": (151936, 896),
    "gemma qkv": (1536, 640),
    "gemma o": (640, 1024),
    "gemma gate_up": (4096, 640),
    "gemma down": (640, 2048),
}


def linear_peers(weight: Tensor, rows: int, copies: int) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    """x Wᵀ as others compute it for so many rows, `copies` weights each, by name; what a peer refuses isn't there."""

    def onednn(of: Tensor) -> Callable[[Tensor], Tensor]:
        packed = torch.ops.mkldnn._reorder_linear_weight(of.contiguous(), rows)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    def mkl(of: Tensor) -> Callable[[Tensor], Tensor]:
        packed = torch.ops.mkl._mkl_reorder_linear_weight(of, rows)
        return lambda x: torch.ops.mkl._mkl_linear(x, packed, of, None, rows)

    made: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
        "onednn": onednn,
        "torch": lambda of: partial(F.linear, weight=of),
    }
    if weight.dtype == torch.float32 and torch.backends.mkl.is_available():
        made["mkl"] = mkl
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        del made["onednn"]
    return {name: [make(weight.clone()) for _ in range(copies)] for name, make in made.items()}


def bfloat16_peers(weight: Tensor, rows: int, copies: int) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    """... of bfloat16, by products of bfloat16, and of float32 on a widened x, whose result stays float32."""
    made = linear_peers(weight, rows, copies)
    if weight.shape[0] > MOST_WIDENED:
        return made

    def widened(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: call(x.float())

    wide = linear_peers(weight.float(), rows, -(-copies // 2))
    return made | {f"{name} float32": [widened(call) for call in each] for name, each in wide.items()}


def call_in_turn(x: Tensor, others: list[Callable[[Tensor], Tensor]], i: int) -> Tensor:
    return others[i % len(others)](x)


def linear_points(bench: Bench, extension: Extension, row_counts: list[int], dtypes: list[str]) -> Iterator[Point]:
    plain = NativeKernels(extension)
    for name, (num_out, num_in) in LINEARS.items():
        for kind in dtypes:
            if "lm_head" in name and kind == "float32":
                continue  # 1.1 GB of weights twice
            dtype = torch.float32 if kind == "float32" else torch.bfloat16
            native = NativeKernels(extension, kind) if kind in ("int8", "w8a8") else plain
            weight = torch.randn(num_out, num_in).to(dtype)
            packed = native.pack(weight)
            copies = max(1, -(-COLD_BYTES // packed.nbytes))
            weights = [packed, *(native.pack(weight) for _ in range(copies - 1))]
            for rows in row_counts:
                if "lm_head" in name and rows > 32:
                    continue
                x = torch.randn(rows, num_in).to(dtype)
                spaced = spaced_rows(rows, num_in, dtype).copy_(x)  # as other ops of the engine leave it
                if kind == "float32":
                    others = linear_peers(weight, rows, copies)
                elif kind == "bfloat16":
                    others = bfloat16_peers(weight, rows, copies)
                else:
                    packs = [plain.pack(weight) for _ in range(-(-copies // 2))]
                    others = {"native bfloat16": [partial(plain.linear, weight=each) for each in packs]}

                def run_native(i: int, x: Tensor = spaced, weights: list[PackedWeight] = weights) -> object:
                    return native.linear(x, weights[i % len(weights)])  # noqa: B023

                peers = {name: partial(call_in_turn, x, each) for name, each in others.items()}
                flops = 2 * rows * num_out * num_in
                yield compare(bench, name, kind, rows, run_native, peers, num_bytes=packed.nbytes, flops=flops)


def attention_points(bench: Bench, native: NativeKernels, tiled: TiledKernels) -> Iterator[Point]:
    """14 query heads on 2 kv heads of 64, decode steps and prefill of one prompt, against the torch set."""
    dtype, block_size = torch.bfloat16, 16
    for batch_size, query_len, context in ((1, 1, 4096), (8, 1, 1024), (32, 1, 512), (1, 512, 512), (1, 512, 2048)):
        blocks = context // block_size
        pool = torch.randn(batch_size * blocks, 2, 2, block_size, 64).to(dtype)
        order = torch.randperm(batch_size * blocks).view(batch_size, blocks).tolist()
        batch = PagedBatch.build([query_len] * batch_size, [context] * batch_size, order, block_size)
        plan = native.plan_attention(batch, group_size=7, window=None)
        tiled_plan = plan_attention(batch, group_size=7, window=None)
        q = torch.randn(batch_size * query_len, 14, 64).to(dtype)
        k, v = pool[:, 0], pool[:, 1]
        visible = batch_size * (query_len * context - query_len * (query_len - 1) // 2)

        def run_native(_: int, q: Tensor = q, k: Tensor = k, v: Tensor = v, plan: NativePlan = plan) -> object:
            return native.paged_attention(q, k, v, plan, scale=0.125)

        def run_tiled(_: int, q: Tensor = q, k: Tensor = k, v: Tensor = v, plan: AttentionPlan = tiled_plan) -> object:
            return tiled.paged_attention(q, k, v, plan, scale=0.125)

        yield compare(
            bench, f"attention {context}", "bfloat16", batch_size * query_len,
            run_native, {"torch": run_tiled},
            num_bytes=batch_size * context * 2 * 2 * 64 * 2, flops=4 * visible * 14 * 64,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32", "int8", "w8a8"], help="of the products")
    parser.add_argument("--rows", type=int, nargs="+", help="of the products")
    parser.add_argument("--out", type=Path, help="write a CSV")
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread's CPU time, so that other load matters less"
    )
    options = parser.parse_args()
    threads = 1 if options.cpu_time else options.threads
    clock = time.thread_time if options.cpu_time else time.perf_counter
    extension = kernels.cpu.load()
    extension.configure_threads(threads)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    native = NativeKernels(extension)
    buffer = torch.ones(512 << 20, dtype=torch.uint8)
    seconds = [timed(clock, lambda _: extension.module.read(buffer.data_ptr(), buffer.numel()), 1) for _ in range(5)]
    bandwidth = buffer.numel() / statistics.median(seconds)
    bench = Bench(5 if options.quick else 9, bandwidth, clock)
    load = os.getloadavg()[0]
    print(
        f"{processor()}, {threads} threads, {extension.isa}, torch {torch.__version__}, "
        f"read {bandwidth / 1e9:.1f} GB/s, load {load:.1f}"
    )
    row_counts = options.rows or ([1, 8, 32, 512] if options.quick else [1, 8, 16, 32, 128, 512])
    points = []
    print(
        f"{'op':<18}{'dtype':<10}{'rows':>5} {'peer':<16}{'native us':>11}{'other us':>11}{'ratio':>7}"
        f"{'GB/s':>7}{'GFLOP/s':>9}{'floor':>7}"
    )
    sources = {
        "linear": lambda: linear_points(bench, extension, row_counts, options.dtypes),
        "attention": lambda: attention_points(bench, native, TiledKernels(threads)),
        "small": lambda: small_points(bench, native),
    }
    for name in options.ops:
        for p in sources[name]():
            points.append(p)
            print(
                f"{p.op:<18}{p.dtype:<10}{p.rows:>5} {p.peer:<16}{p.native_us:>11.0f}{p.other_us:>11.0f}{p.ratio:>7.2f}"
                f"{p.gigabytes_per_second:>7.1f}{p.gigaflops:>9.0f}{p.floor:>7.2f}",
                flush=True,
            )
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["hardware", "threads", "isa", "bandwidth", "load", *(f.name for f in fields(Point))])
            for p in points:
                writer.writerow([processor(), threads, extension.isa, bandwidth, load, *astuple(p)])


if __name__ == "__main__":
    main()
