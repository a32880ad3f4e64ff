"""One layer's products for 32 rows with 32 adapters (rank 8, all projections) against the same without adapters.

    .venv/bin/python bench/lora_layer.py [--dtype bfloat16] [--csv FILE]

In CPU time of one thread, by turns, for a machine with other load; `python -m bench.lora_step` times whole steps.
"""

import argparse
import csv
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kernels.cpu
from bench.machine import processor
from kernels.cpu.native import NativeKernels
from kernels.lora import Lora, LoraRows, LoraStack

ROWS, RANK = 32, 8
COPIES = 2  # of the layer, so that no weight is still in a cache


def shapes(hidden: int, ffn: int, kv_size: int) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Of each projection: inputs, and the columns of its parts."""
    return {
        "qkv_proj": (hidden, (hidden, kv_size, kv_size)),
        "o_proj": (hidden, (hidden,)),
        "gate_up_proj": (hidden, (ffn, ffn)),
        "down_proj": (ffn, (hidden,)),
    }


def adapters(num_in: int, widths: tuple[int, ...], dtype: torch.dtype) -> Lora:
    stack = LoraStack(
        a=torch.randn(ROWS, len(widths), RANK, num_in).to(dtype),
        b=torch.randn(ROWS, RANK, sum(widths)).to(dtype),
        ranks=torch.full((ROWS, len(widths)), RANK),
        widths=widths,
        columns=torch.tensor(widths),
    )
    rows = LoraRows.build(range(ROWS))
    assert rows is not None
    return Lora(stack, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--ffn", type=int, default=4864)
    parser.add_argument("--kv-size", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    extension = kernels.cpu.load()
    extension.configure_threads(1)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    native = NativeKernels(extension)

    def timed(x: Tensor, weights: list[Tensor], packed: object, lora: Lora | None) -> float:
        start = time.thread_time()
        if len(weights) == 2:
            native.gated_linear(x, packed, "silu", lora=lora)  # type: ignore[arg-type]
        else:
            native.linear(x, packed, lora=lora)  # type: ignore[arg-type]
        return (time.thread_time() - start) * 1e6

    lines, totals = [], [0.0, 0.0]
    for name, (num_in, widths) in shapes(options.hidden, options.ffn, options.kv_size).items():
        gated = name == "gate_up_proj"
        times: list[list[float]] = [[], []]
        matrices = [torch.randn(width, num_in).to(dtype) for width in (widths if gated else (sum(widths),))]
        copies = [(native.pack(*matrices, gated=gated), adapters(num_in, widths, dtype)) for _ in range(COPIES)]
        for call in range(COPIES * options.calls):
            packed, lora = copies[call % COPIES]
            x = torch.randn(ROWS, num_in).to(dtype)
            for own, change in zip(times, (None, lora), strict=True):
                own.append(timed(x, matrices, packed, change))
        base, adapted = (statistics.median(own[COPIES:]) for own in times)
        totals = [totals[0] + base, totals[1] + adapted]
        lines.append((name, base, adapted))
    lines.append(("layer", totals[0], totals[1]))
    for name, base, adapted in lines:
        print(f"{name:<13} {base:>7.0f} us, with adapters {adapted:>7.0f} us: {adapted / base:.2f}")
    if options.csv is not None:
        is_new = not options.csv.exists()
        with options.csv.open("a", newline="") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(["hardware", "isa", "load", "dtype", "projection", "base_us", "adapters_us", "ratio"])
            known = [processor(), extension.isa, f"{os.getloadavg()[0]:.1f}", options.dtype]
            writer.writerows([*known, name, base, adapted, adapted / base] for name, base, adapted in lines)


if __name__ == "__main__":
    main()
