"""Gated activations: y = act(gate) · up, float32 inside, rounded once.

    silu(x) = x · sigmoid(x)
    gelu(x) = x / 2 · (1 + tanh(z)) = x · sigmoid(2 z),  z = sqrt(2 / pi) · (x + 0.044715 x³)

gate, up [M, F], rows contiguous (halves of one matrix product are fine) -> [M, F]. Elementwise, so row-invariant.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 2048  # 8 warps x 32 lanes x 8 bf16: one 16-byte access a lane and operand


@triton.jit
def _gated_kernel(gate, up, out, num_columns, stride_gate, stride_up, GELU: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    x = tl.load(gate + row * stride_gate + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * stride_up + column, mask=inside, other=0.0).to(tl.float32)
    z = x
    if GELU:
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    # exp(-|z|) can't overflow: sigmoid(z) = 1 / (1 + e) for z >= 0, e / (1 + e) below
    e = tl.exp(-tl.abs(z))
    result = x * (tl.where(z >= 0, 1.0, e) / (1.0 + e)) * y
    tl.store(out + row * num_columns + column, result.to(out.dtype.element_ty), mask=inside)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up. Raises ValueError."""
    return _launch(gate, up, gelu=False)


def gelu_tanh_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) · up. Raises ValueError."""
    return _launch(gate, up, gelu=True)


def _launch(gate: Tensor, up: Tensor, *, gelu: bool) -> Tensor:
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.stride(1) != 1 or up.stride(1) != 1:
        raise ValueError(f"gate {gate.dtype} {tuple(gate.shape)} and up {up.dtype} {tuple(up.shape)} do not fit")
    num_rows, num_columns = gate.shape
    out = torch.empty(num_rows, num_columns, dtype=gate.dtype, device=gate.device)
    if num_rows == 0:
        return out
    grid = (num_rows, triton.cdiv(num_columns, _COLUMNS))
    strides = (gate.stride(0), up.stride(0))
    _gated_kernel[grid](
        gate, up, out, num_columns, *strides, GELU=gelu, COLUMNS=_COLUMNS, num_warps=8, enable_fp_fusion=False
    )
    return out
