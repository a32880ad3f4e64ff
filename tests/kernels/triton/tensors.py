"""Random tensors, and the comparison with float64."""

import torch
from torch import Tensor

HALF_ULP = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""The largest relative error of one rounding."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(out: Tensor, expected: Tensor, *, roundings: float, scale: Tensor | None = None) -> None:
    """|out - expected| <= roundings * half an ulp of `scale` (by default the expected value itself), plus 1e-7."""
    assert expected.dtype == torch.float64
    assert out.shape == expected.shape
    size = expected.abs() if scale is None else scale
    excess = (out.double() - expected).abs() - roundings * HALF_ULP[out.dtype] * size - 1e-7
    assert not out.isnan().any()
    assert excess.numel() == 0 or float(excess.max()) <= 0.0
