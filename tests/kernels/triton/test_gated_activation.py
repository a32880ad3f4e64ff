"""Gated activations against float64. 16 bits: one rounding. float32: 30 for exp of up to 30, ten for the rest."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.triton import gated_activation
from tests.kernels.triton.mutants import mutant
from tests.kernels.triton.tensors import DTYPES, assert_close, random

OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu_and_mul": reference.silu_and_mul,
    "gelu_tanh_and_mul": reference.gelu_tanh_and_mul,
}


def check(kernels: ModuleType, op: str, dtype: torch.dtype, num_columns: int = 2049) -> None:
    both = random(3, 2 * num_columns, dtype=dtype) * 4  # the halves of one matrix product
    gate, up = both.chunk(2, dim=1)
    out = getattr(kernels, op)(gate, up)
    assert_close(out, OPS[op](gate.double(), up.double()), roundings=40.0 if dtype == torch.float32 else 1.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_float64(op: str, dtype: str) -> None:
    for num_columns in (1, 75, 2049):
        check(gated_activation, op, DTYPES[dtype], num_columns)


@pytest.mark.parametrize("op", OPS)
def test_far_from_zero(op: str) -> None:
    gate = torch.tensor([[-3e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 3e4]])
    out = getattr(gated_activation, op)(gate, torch.ones_like(gate))
    assert_close(out, gate.double().clamp(min=0), roundings=2.0, scale=gate.double().abs() + 1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("op", "old", "new"),
    [
        ("gelu_tanh_and_mul", "0.044715 * x", "0.0447 * x"),
        ("gelu_tanh_and_mul", "1.59576912", "1.59566912"),
        ("silu_and_mul", "tl.where(z >= 0, 1.0, e)", "1.0"),
        ("silu_and_mul", "row * stride_up", "row * stride_up + 1"),
    ],
)
def test_a_planted_bug_goes_red(op: str, old: str, new: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(mutant(gated_activation, old, new, tmp_path), op, torch.float32)


def test_a_row_does_not_depend_on_the_others() -> None:
    gate, up = random(9, 75), random(9, 75, seed=1)
    together = gated_activation.silu_and_mul(gate, up)
    assert torch.equal(gated_activation.silu_and_mul(gate[4:5], up[4:5])[0], together[4])
    assert gated_activation.silu_and_mul(gate[:0], up[:0]).shape == (0, 75)
