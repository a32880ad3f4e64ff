"""Times a mixture's experts in two native calls against expert by expert, and native routing against torch's.

    .venv/bin/python bench/experts.py                  a table
    .venv/bin/python bench/experts.py --cpu-time       one thread, its CPU time: for a machine with other load
    .venv/bin/python bench/experts.py --out FILE       a CSV too

A layer of 64 experts of 1024 x 512, 6 of them for each row, bfloat16: 192 MiB, so that no weight is still in a cache.
By turns, from the router's logits on: expert by expert and together, both routed by torch, and together with the
native routing. `ratio` above 1 means that together is faster, `routed_ratio` that the native routing makes it faster
still; the results are compared.
"""

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kernels.cpu
from bench.machine import processor
from kernels import routing
from kernels.cpu.native import NativeKernels
from kernels.cpu.packed import PackedWeight
from kernels.products import Product
from kernels.routing import Routed, RoutingRule

HIDDEN, FFN, EXPERTS, TOP_K = 1024, 512, 64, 6
ROWS = (1, 4, 16, 64, 512)
RULE = RoutingRule(TOP_K, normalize=True)
Experts = list[tuple[PackedWeight, PackedWeight]]
Route = Callable[[Tensor, RoutingRule], Routed]


def one_by_one(native: NativeKernels, x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
    routed = routing.route(logits, RULE)
    by_expert = routed.by_expert
    results = x.new_empty(len(by_expert.rows), HIDDEN)
    for expert, start, end in by_expert.spans:
        gate_up, down = experts[expert]
        results[start:end] = native.linear(native.gated_linear(x[by_expert.rows[start:end]], gate_up, "silu"), down)
    return routing.combine(results, routed.chosen.weights, by_expert.places)


def together(
    native: NativeKernels, x: Tensor, logits: Tensor, experts: Experts, route: Route = routing.route
) -> Tensor:
    routed = route(logits, RULE)
    by_expert = routed.by_expert
    rows = x.index_select(0, by_expert.rows)
    activated, results = rows.new_empty(len(rows), FFN), torch.empty_like(rows)
    spans = [(*experts[expert], slice(start, end)) for expert, start, end in by_expert.spans]
    native.linear_each([Product(rows[span], up, activated[span]) for up, _, span in spans], "silu")
    native.linear_each([Product(activated[span], down, results[span]) for _, down, span in spans])
    return native.combine(results, routed.chosen.weights, by_expert.places)


def seconds(clock: Callable[[], float], call: Callable[[], object], count: int) -> float:
    start = clock()
    for _ in range(count):
        call()
    return (clock() - start) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    threads = 1 if options.cpu_time else options.threads
    clock = time.thread_time if options.cpu_time else time.perf_counter
    extension = kernels.cpu.load()
    extension.configure_threads(threads)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    native = NativeKernels(extension)
    matrix = torch.randn(FFN, HIDDEN).bfloat16() * HIDDEN**-0.5
    experts = [(native.pack(matrix, matrix, gated=True), native.pack(matrix.t().contiguous())) for _ in range(EXPERTS)]
    head = ["hardware", "threads", "clock", "isa", "load", "rows"]
    head += ["one_by_one_us", "together_us", "routed_us", "ratio", "routed_ratio"]
    lines = []
    print(f"{processor()}, {threads} threads, {extension.isa}, load {os.getloadavg()[0]:.1f}")
    print(f"{'rows':>5}{'one by one us':>15}{'together us':>13}{'routed us':>11}{'ratio':>7}{'routed':>8}")
    for num_rows in options.rows:
        work = (native, torch.randn(num_rows, HIDDEN).bfloat16(), torch.randn(num_rows, EXPERTS), experts)
        ways: tuple[Callable[[], Tensor], ...] = (
            lambda: one_by_one(*work),  # noqa: B023
            lambda: together(*work),  # noqa: B023
            lambda: together(*work, native.route),  # noqa: B023
        )
        apart, both, routed = (way() for way in ways)
        assert torch.equal(apart, both)
        assert (routed - both).abs().max() <= 0.01 * both.abs().max()
        count = max(1, 64 // num_rows)
        turns = [[seconds(clock, way, count) for way in ways] for _ in range(options.pairs)]
        times = [min(values) * 1e6 for values in zip(*turns, strict=True)]
        ratios = [statistics.median(turn[i] / turn[i + 1] for turn in turns) for i in (0, 1)]
        print(
            f"{num_rows:>5}{times[0]:>15.0f}{times[1]:>13.0f}{times[2]:>11.0f}{ratios[0]:>7.2f}{ratios[1]:>8.2f}",
            flush=True,
        )
        kind = "cpu" if options.cpu_time else "wall"
        load = f"{os.getloadavg()[0]:.1f}"
        lines.append([processor(), threads, kind, extension.isa, load, num_rows, *times, *ratios])
    if options.out:
        with options.out.open("w", newline="") as file:
            csv.writer(file).writerows([head, *lines])


if __name__ == "__main__":
    main()
