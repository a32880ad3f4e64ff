"""Adapters on the native kernels: rows of one adapter are tasks of their own, for every projection in one call."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.packed import DTYPES, STRIP_ROWS, PackedWeight
from kernels.cpu.packed_groups import PackedGroups
from kernels.cpu.spaced_rows import spaced_rows
from kernels.lora import Lora


def add_lora(ops: Any, y: Tensor, x: Tensor, change: Lora, *, strips: bool = False) -> None:
    """y[row] += (x[row] Aᵀ) Bᵀ for the rows that have an adapter, in float32 and in place.

    x [M, K], y [M, N] of x's dtype or float32; with `strips` its two parts lie in strips of 16 columns, by turns.
    Raises ValueError for shapes that don't fit.
    """
    stack, rows = change.stack, change.rows
    if x.dtype != stack.a.dtype or y.dtype not in (x.dtype, torch.float32) or x.shape[1] != stack.a.shape[3]:
        raise ValueError(f"{x.dtype} rows of {x.shape[1]} don't fit adapters of {stack.a.dtype} {stack.a.shape}")
    inputs = x if x.stride(1) == 1 else x.contiguous()
    ops.lora(
        *(DTYPES[x.dtype], inputs.data_ptr(), inputs.stride(0), y.data_ptr(), y.stride(0), y.dtype != x.dtype, strips),
        *(stack.a.data_ptr(), stack.b.data_ptr(), stack.ranks.data_ptr(), stack.columns.data_ptr()),
        *(len(stack.widths), stack.max_rank, x.shape[1], stack.b.shape[2]),
        *(rows.rows.data_ptr(), rows.blocks.data_ptr(), rows.blocks.shape[0], rows.rows.shape[0]),
    )


def as_strips(weight: PackedWeight | PackedGroups) -> PackedWeight | PackedGroups:
    """A packed gate and up projection as one whose columns are those of both, 16 by turns; `linear` takes it."""
    width = 2 * (-(-weight.num_out // STRIP_ROWS) * STRIP_ROWS)
    return replace(weight, num_out=width, gated=False)


def activate_strips(ops: Any, both: Tensor, num_out: int, activation: int, dtype: torch.dtype) -> Tensor:
    """act(gate) · up of float32 sums in strips. -> [M, num_out]."""
    out = spaced_rows(both.shape[0], num_out, dtype)
    ops.gated_strips(
        *(DTYPES[dtype], both.data_ptr(), both.stride(0), out.data_ptr(), out.stride(0)),
        *(both.shape[0], num_out, activation),
    )
    return out
