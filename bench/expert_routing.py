"""Times a mixture's routing, natively and by torch, in CPU time of one thread, by turns.

.venv/bin/python bench/expert_routing.py [--out FILE]
"""

import argparse
import csv
import os
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kernels.cpu
from bench.machine import processor
from kernels import routing
from kernels.cpu.native import NativeKernels
from kernels.routing import GroupLimit, RoutingRule

RULES = {
    "mixtral": (8, RoutingRule(2, True)),
    "qwen3_moe": (128, RoutingRule(8, True)),
    "deepseek_v3": (256, RoutingRule(8, True, "sigmoid", torch.zeros(256), GroupLimit(8, 4, 2), 2.5)),
}
ROWS = (1, 32, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    extension = kernels.cpu.load()
    extension.configure_threads(1)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    native = NativeKernels(extension)
    lines = []
    for (family, (num_experts, rule)), num_rows in ((each, rows) for each in RULES.items() for rows in ROWS):
        logits = torch.randn(num_rows, num_experts)
        times: list[list[float]] = [[], []]
        for _ in range(options.calls):
            for own, route in zip(times, (routing.route, native.route), strict=True):
                start = time.thread_time()
                route(logits, rule)
                own.append((time.thread_time() - start) * 1e6)
        by_torch, natively = (statistics.median(own) for own in times)
        print(f"{family:<12}{num_rows:>5} rows: torch {by_torch:>7.0f} us, native {natively:>6.0f} us", flush=True)
        load = f"{os.getloadavg()[0]:.1f}"
        lines.append([processor(), extension.isa, load, family, num_experts, num_rows, by_torch, natively])
    if options.out:
        with options.out.open("w", newline="") as file:
            head = ["hardware", "isa", "load", "family", "experts", "rows", "torch_us", "native_us"]
            csv.writer(file).writerows([head, *lines])


if __name__ == "__main__":
    main()
