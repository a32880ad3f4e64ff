"""RMSNorm over the last dimension, of x or of x + residual.

    y = round(x / sqrt(mean(x²) + eps)) · w             float32 inside, rounded before the weight, as Llama does
    y = x / sqrt(mean(x²) + eps) · (1 + w)              with `unit_offset` (Gemma): rounded once

x, residual [..., H], weight [H] -> [..., H]. A program takes ROWS whole rows; ROWS follows from H alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SIZE = 32768


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    num_rows,
    stride_x,
    stride_residual,
    eps,
    H: tl.constexpr,
    COLUMNS: tl.constexpr,  # H padded to a power of two
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < H)[None, :]
    values = tl.load(x + row[:, None] * stride_x + column[None, :], mask=inside, other=0.0)
    cell = row[:, None] * H + column[None, :]
    if ADD:
        added = tl.load(residual + row[:, None] * stride_residual + column[None, :], mask=inside, other=0.0)
        values = (values.to(tl.float32) + added.to(tl.float32)).to(out.dtype.element_ty)
        tl.store(total + cell, values, mask=inside)
    wide = values.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / H + eps)
    normed = wide * scale[:, None]
    w = tl.load(weight + column, mask=column < H, other=0.0)[None, :].to(tl.float32)
    result = normed * (w + 1.0)
    if not UNIT_OFFSET:
        result = normed.to(out.dtype.element_ty).to(tl.float32) * w
    tl.store(out + cell, result.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """x [..., H] -> [..., H]. Raises ValueError."""
    return _launch(x, None, weight, eps, unit_offset)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual). Raises ValueError."""
    return _launch(x, residual, weight, eps, unit_offset)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    if weight.shape != (size,) or not weight.is_contiguous() or size > MAX_SIZE:
        raise ValueError(f"weight {tuple(weight.shape)} must be contiguous [{size}], and no row above {MAX_SIZE}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"residual {residual.dtype} {tuple(residual.shape)} for x {x.dtype} {tuple(x.shape)}")
    rows = _rows(x)
    added = rows if residual is None else _rows(residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    if rows.shape[0] == 0:
        return out, total
    columns = triton.next_power_of_2(size)
    rows_per_program = max(2048 // columns, 1)
    _rms_norm_kernel[(triton.cdiv(rows.shape[0], rows_per_program),)](
        rows,
        added,
        weight,
        out,
        total,
        rows.shape[0],
        rows.stride(0),
        added.stride(0),
        eps,
        H=size,
        COLUMNS=columns,
        ROWS=rows_per_program,
        ADD=residual is not None,
        UNIT_OFFSET=unit_offset,
        num_warps=4 if columns <= 4096 else 8,
        enable_fp_fusion=False,
    )
    return out, total


def _rows(x: Tensor) -> Tensor:
    """[rows, H] with contiguous rows; a copy only where strides leave no other way."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
