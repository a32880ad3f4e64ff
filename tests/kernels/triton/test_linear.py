"""The matrix product against float64, and a row against itself in other company.

float32: sums of K products in chains of at most 1024, K roundings of 2^-24 relative to the sum of |x w|; measured below
a tenth of that. 16-bit results: one rounding more.
"""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels import reference
from kernels.triton import linear
from tests.kernels.triton.mutants import mutant
from tests.kernels.triton.tensors import DTYPES, HALF_ULP, random


def check(
    kernels: ModuleType, rows: int, depth: int, columns: int, dtype: torch.dtype = torch.float32, *, added: bool = True
) -> None:
    x, weight = random(rows, depth, dtype=dtype), random(columns, depth, dtype=dtype, seed=1)
    bias, residual = random(columns, dtype=dtype, seed=2), random(rows, columns + 3, dtype=dtype, seed=3)[:, 1:-2]
    out = kernels.linear(x, weight, bias if added else None, residual=residual if added else None)
    expected = reference.linear(x.double(), weight.double(), bias.double() if added else None)
    expected = expected + residual.double() if added else expected
    size = x.double().abs() @ weight.double().abs().t()
    excess = (out.double() - expected).abs() - HALF_ULP[dtype] * expected.abs() - 8 * 2.0**-24 * size
    assert out.dtype == dtype
    assert float(excess.max()) <= 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_float64(dtype: str) -> None:
    for rows, depth, columns in ((1, 75, 3), (17, 64, 130), (65, 1, 1)):
        check(linear, rows, depth, columns, DTYPES[dtype])
        check(linear, rows, depth, columns, DTYPES[dtype], added=False)


def test_several_splits_of_the_depth() -> None:
    check(linear, 3, 2100, 5)
    check(linear, 129, 2100, 5)


def test_float32_results_of_bfloat16() -> None:
    x, weight = random(2, 80, dtype=torch.bfloat16), random(7, 80, dtype=torch.bfloat16, seed=1)
    out = linear.linear(x, weight, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert torch.allclose(out.double(), reference.linear(x.double(), weight.double()), atol=1e-5, rtol=0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("old", "new", "rows"),
    [
        ("tl.minimum(begin + SPLIT, K)", "begin + SPLIT // 2", 3),
        ("* split) * N", "* 0) * N", 3),
        ("row * stride_residual + column", "row + column", 3),
        ("bias + column, mask=inside", "bias + 0 * column, mask=inside", 3),
        ("split * SPLIT, num_rows", "split * SPLIT // 2, num_rows", 3),
        ("range(0, K, SPLIT)", "range(0, K - SPLIT, SPLIT)", 129),
        ("inner // rows_in_group * COLUMNS", "0 * COLUMNS", 129),
        ("inner % rows_in_group) * ROWS", "0) * ROWS", 129),
    ],
)
def test_a_planted_bug_goes_red(old: str, new: str, rows: int, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(mutant(linear, old, new, tmp_path), rows, 1100, 130)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_the_number_of_rows(dtype: str) -> None:
    """Bitwise, on either side of SPREAD_ROWS."""
    x, weight = random(133, 1100, dtype=DTYPES[dtype]), random(9, 1100, dtype=DTYPES[dtype], seed=1)
    bias, residual = random(9, dtype=DTYPES[dtype], seed=2), random(133, 9, dtype=DTYPES[dtype], seed=3)
    together = linear.linear(x, weight, bias, residual=residual)
    for rows in (slice(0, 1), slice(70, 71), slice(60, 132)):
        assert torch.equal(linear.linear(x[rows], weight, bias, residual=residual[rows]), together[rows])
    some = linear.linear(x[:, :1100], weight[2:5].contiguous(), bias[2:5], residual=residual[:, 2:5])
    assert torch.equal(some, together[:, 2:5])


def test_no_rows_and_what_does_not_fit() -> None:
    assert linear.linear(random(0, 8), random(3, 8)).shape == (0, 3)
    with pytest.raises(ValueError, match=r"x torch.float32 \(2, 8\) and weight torch.float32 \(3, 9\) do not fit"):
        linear.linear(random(2, 8), random(3, 9))
    with pytest.raises(ValueError, match="bias"):
        linear.linear(random(2, 8), random(3, 8), random(2))
    with pytest.raises(ValueError, match="residual"):
        linear.linear(random(2, 8), random(3, 8), residual=random(2, 4))
