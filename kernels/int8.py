"""Symmetric int8 by rows, in plain torch: how weights are quantized, and the oracle of the native int8 kernels.

weights        W ≈ q · s: s = max |row| / 127, q the nearest of -127 … 127; -128 is never used
activations    the same for each token's row at run time ("w8a8"), in float32 operations that every set repeats exactly
"""

from typing import Literal

import torch
from torch import Tensor

Quantization = Literal["int8", "w8a8"]
"""int8: weights alone. w8a8: activations too, so that products and sums are integers."""

MAX_DEPTH = 131072
"""Columns of a weight whose sum of int8 products surely fits 32 bits."""


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """W [N, K] -> (int8 [N, K], float32 scales [N]). Raises ValueError when a row isn't finite."""
    wide = weight.float()
    scales = wide.abs().amax(1) / 127.0
    if not bool(torch.isfinite(scales).all()):
        row = int((~torch.isfinite(scales)).nonzero()[0])
        raise ValueError(f"row {row} of a weight {list(weight.shape)} has an infinity or a NaN: it has no int8 form")
    steps = torch.where(scales == 0, 1.0, scales)
    return torch.round(wide / steps[:, None]).clamp_(-127, 127).to(torch.int8), scales


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> (int8 [M, K], float32 scales [M]): x · (127 / max |x|), rounded to the nearest, halves to even."""
    wide = x.float()
    largest = wide.abs().amax(1)
    inverse = torch.full_like(largest, 127.0).div_(
        largest
    )  # not 127.0 / largest, which torch computes in two roundings
    inverse = torch.where(largest == 0, 0.0, inverse)
    return torch.round(wide * inverse[:, None]).clamp_(-127, 127).to(torch.int8), largest / 127.0


def dequantize(q: Tensor, scales: Tensor) -> Tensor:
    """float32 [N, K]."""
    return q.float() * scales[:, None]


def linear_w8a8(x: Tensor, q: Tensor, scales: Tensor) -> Tensor:
    """float32 (xq Qᵀ) · x's scales · `scales`, in this order. x [M, K], q [N, K] -> [M, N].

    The sums are integers below 2^53, so they are exact in float64 in any order, and rows independent of one another.
    """
    rows, row_scales = quantize_rows(x)
    sums = rows.double() @ q.double().T
    return sums.float() * row_scales[:, None] * scales


def embedding(ids: Tensor, q: Tensor, scales: Tensor, dtype: torch.dtype, scale: float | None = None) -> Tensor:
    """q · (s · scale) in float32, then rounded; `scale` is rounded to `dtype` first. ids [T] -> [T, K]."""
    factor = scales[ids] if scale is None else scales[ids] * torch.tensor(scale).to(dtype).float()
    return (q[ids].float() * factor[:, None]).to(dtype)


def linear(x: Tensor, q: Tensor, scales: Tensor) -> Tensor:
    """x (q · s)ᵀ in float64: the oracle of the weight-only product. x [M, K], q [N, K] -> float64 [M, N]."""
    return (x.double() @ q.double().T) * scales.double()
