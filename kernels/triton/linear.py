"""Matrix product with a fixed order of the sum: y = x Wᵀ + b + residual, accumulated in float32, rounded once.

    x [M, K], weight [N, K], bias [N], residual [M, N] -> [M, N] in x's dtype, or in float32

K is cut into splits of SPLIT, a number that follows from K alone. A split is summed by one chain of tile products; the
splits are added one by one, in order. Up to SPREAD_ROWS rows each split is a program of its own, which leaves its sum
in a workspace for a second pass, so that a few rows occupy the whole device; with more rows one program goes through
all splits. Tile shape, instruction and order are the same in both, and so are the bits (cuBLAS picks its kernel by M).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.device import device_arch

SPREAD_ROWS = 128
SPLIT = 1024

_ROWS, _COLUMNS, _DEPTH = 64, 128, 64
_GROUP = 8  # row tiles that go through the same columns of W one after another, out of the L2 cache
_ADDED = 1024


@triton.jit
def _sum_split(
    x, weight, row, column, begin, num_rows, N: tl.constexpr, K: tl.constexpr, stride_x, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, COLUMNS]: the sum over begin : begin + SPLIT."""
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(begin, tl.minimum(begin + SPLIT, K), DEPTH):
        k = start + tl.arange(0, DEPTH)
        left = x + row[:, None] * stride_x + k[None, :]
        right = weight + column[None, :].to(tl.int64) * K + k[:, None]
        a = tl.load(left, mask=(row < num_rows)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(right, mask=(column < N)[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def _finish(total, bias, residual, row, column, inside, stride_residual, HAS_BIAS: tl.constexpr, ADD: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(residual + row * stride_residual + column, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _whole_kernel(
    x, weight, bias, residual, out, num_rows, stride_x, stride_residual, N: tl.constexpr, K: tl.constexpr,
    HAS_BIAS: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    SPLIT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """All splits of a tile, one after another."""
    tile, num_row_tiles = tl.program_id(0), tl.cdiv(num_rows, ROWS)
    num_column_tiles = tl.cdiv(N, COLUMNS)
    group = tile // (GROUP * num_column_tiles)
    rows_in_group = tl.minimum(num_row_tiles - group * GROUP, GROUP)
    inner = tile % (GROUP * num_column_tiles)
    row = ((group * GROUP + inner % rows_in_group) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = inner // rows_in_group * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, K, SPLIT):
        total += _sum_split(x, weight, row, column, begin, num_rows, N, K, stride_x, ROWS, COLUMNS, DEPTH, SPLIT)
    inside = (row < num_rows)[:, None] & (column < N)[None, :]
    row, column = row[:, None], column[None, :]
    total = _finish(total, bias, residual, row, column, inside, stride_residual, HAS_BIAS, ADD)
    tl.store(out + row * N + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _split_kernel(
    x, weight, parts, num_rows, stride_x, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One split of a tile -> parts float32 [splits, M, N]."""
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    total = _sum_split(x, weight, row, column, split * SPLIT, num_rows, N, K, stride_x, ROWS, COLUMNS, DEPTH, SPLIT)
    cell = parts + (split.to(tl.int64) * num_rows + row[:, None]) * N + column[None, :]
    tl.store(cell, total, mask=(row < num_rows)[:, None] & (column < N)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _add_kernel(
    parts, bias, residual, out, num_rows, stride_residual, N: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Adds the splits in order, from 0, as the other kernel does."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < N
    total = tl.zeros([COLUMNS], tl.float32)
    for split in tl.static_range((K + SPLIT - 1) // SPLIT):
        total += tl.load(parts + (row + num_rows.to(tl.int64) * split) * N + column, mask=inside, other=0.0)
    total = _finish(total, bias, residual, row, column, inside, stride_residual, HAS_BIAS, ADD)
    tl.store(out + row * N + column, total.to(out.dtype.element_ty), mask=inside)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x Wᵀ + b + residual. Raises ValueError."""
    (num_rows, depth), num_columns = x.shape, weight.shape[0]
    if weight.shape[1] != depth or not weight.is_contiguous() or weight.dtype != x.dtype or x.stride(1) != 1:
        raise ValueError(f"x {x.dtype} {tuple(x.shape)} and weight {weight.dtype} {tuple(weight.shape)} do not fit")
    if bias is not None and bias.shape != (num_columns,):
        raise ValueError(f"bias {tuple(bias.shape)} must have {num_columns} entries")
    if residual is not None and (residual.shape != (num_rows, num_columns) or residual.stride(1) != 1):
        raise ValueError(f"residual {tuple(residual.shape)} must be [{num_rows}, {num_columns}] with contiguous rows")
    out = torch.empty(num_rows, num_columns, dtype=out_dtype or x.dtype, device=x.device)
    if num_rows == 0:
        return out
    bias_or_x = x if bias is None else bias
    residual_or_x = x if residual is None else residual
    row_tiles, column_tiles = triton.cdiv(num_rows, _ROWS), triton.cdiv(num_columns, _COLUMNS)
    num_splits = triton.cdiv(depth, SPLIT)
    shape = {"N": num_columns, "K": depth, "SPLIT": SPLIT}
    tile = {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "DEPTH": _DEPTH}
    added = {"HAS_BIAS": bias is not None, "ADD": residual is not None}
    num_warps = 4 if device_arch(x.device) >= 90 else 8  # 4 spill on sm_80 (bench/gpu/aot.csv)
    options = {"num_warps": num_warps, "num_stages": 4 if x.element_size() == 2 else 2, "enable_fp_fusion": False}
    if num_rows > SPREAD_ROWS:
        _whole_kernel[(row_tiles * column_tiles,)](
            x,
            weight,
            bias_or_x,
            residual_or_x,
            out,
            num_rows,
            x.stride(0),
            residual_or_x.stride(0),
            **shape,
            **added,
            **tile,
            GROUP=_GROUP,
            **options,
        )
        return out
    parts = torch.empty(num_splits, num_rows, num_columns, dtype=torch.float32, device=x.device)
    _split_kernel[(column_tiles, row_tiles, num_splits)](
        x, weight, parts, num_rows, x.stride(0), **shape, **tile, **options
    )
    _add_kernel[(num_rows, triton.cdiv(num_columns, _ADDED))](
        parts,
        bias_or_x,
        residual_or_x,
        out,
        num_rows,
        residual_or_x.stride(0),
        **shape,
        **added,
        COLUMNS=_ADDED,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out
