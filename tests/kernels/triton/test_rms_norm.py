"""RMSNorm against float64. float32: 16 roundings for a sum of squares in a tree, a root, a quotient, two products.

16-bit results are rounded twice (before the weight and after it), with `unit_offset` once; float32's errors inside add
a little to that.
"""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels import reference
from kernels.triton import rms_norm
from tests.kernels.triton.mutants import mutant
from tests.kernels.triton.tensors import DTYPES, assert_close, random

SIZES = (1, 64, 75, 640, 2049)


def check(kernels: ModuleType, size: int, dtype: torch.dtype, *, unit_offset: bool, eps: float = 1e-2) -> None:
    x, residual = random(5, size, dtype=dtype), random(5, size, dtype=dtype, seed=1)
    weight = random(size, dtype=dtype, seed=2)
    roundings = 16.0 if dtype == torch.float32 else 1.1 if unit_offset else 2.1
    plain = kernels.rms_norm(x, weight, eps, unit_offset=unit_offset)
    wide = (weight.double(), eps)
    assert_close(plain, reference.rms_norm(x.double(), *wide, unit_offset=unit_offset), roundings=roundings)
    normed, total = kernels.add_rms_norm(x, residual, weight, eps, unit_offset=unit_offset)
    assert torch.equal(total, x + residual)
    assert_close(normed, reference.rms_norm(total.double(), *wide, unit_offset=unit_offset), roundings=roundings)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_float64(unit_offset: bool, dtype: str) -> None:
    for size in SIZES:
        check(rms_norm, size, DTYPES[dtype], unit_offset=unit_offset)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" + eps)", " + eps * 1.01)"),
        ("wide * wide, 1) / H", "wide * wide, 1) / COLUMNS"),
        ("if not UNIT_OFFSET", "if UNIT_OFFSET"),
        ("added.to(tl.float32)", "added.to(tl.float32) * 1.01"),
        ("tl.store(total + cell, values", "tl.store(total + cell, added"),
    ],
)
def test_a_planted_bug_goes_red(old: str, new: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(mutant(rms_norm, old, new, tmp_path), 75, torch.float32, unit_offset=False)


@pytest.mark.parametrize("size", [75, 2049])
def test_a_row_does_not_depend_on_the_others(size: int) -> None:
    x, weight = random(37, size), random(size, seed=1)
    together = rms_norm.rms_norm(x, weight, 1e-6)
    for row in (0, 1, 36):
        assert torch.equal(rms_norm.rms_norm(x[row : row + 1], weight, 1e-6)[0], together[row])


def test_views_and_no_rows() -> None:
    heads = random(6, 4, 96)[:, :2, :64]  # neither dense nor in one stride
    weight = random(64, seed=1)
    assert torch.equal(rms_norm.rms_norm(heads, weight, 1e-6), rms_norm.rms_norm(heads.contiguous(), weight, 1e-6))
    assert rms_norm.rms_norm(heads[:0], weight, 1e-6).shape == (0, 2, 64)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight \(63,\)"):
        rms_norm.rms_norm(random(2, 64), random(63), 1e-6)
