"""Each op against its formula in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.kernel_sets import DTYPES, KERNEL_SETS, RELATIVE

pytestmark = [pytest.mark.parametrize("kernels", KERNEL_SETS), pytest.mark.parametrize("dtype", DTYPES)]


def values(*shape: int, dtype: str, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def assert_close(actual: Tensor, expected: Tensor, *, roundings: int = 1, inner: float = 0.0) -> None:
    """Within `roundings` roundings of the value; plus a float32 rounding of `inner`, the size of terms that cancel."""
    bound = RELATIVE[actual.dtype] * roundings * expected.abs() + RELATIVE[torch.float32] * inner + 1e-30
    excess = (actual.double() - expected).abs() - bound
    assert excess.max() <= 0, f"off by {excess.max()} more than allowed"


def test_linear(kernels: str, dtype: str) -> None:
    x, w, b = values(21, 75, dtype=dtype), values(50, 75, dtype=dtype, seed=1), values(50, dtype=dtype, seed=2)
    product = x.double() @ w.double().T
    assert_close(KERNEL_SETS[kernels].linear(x, w), product, inner=10)
    assert_close(KERNEL_SETS[kernels].linear(x, w, b), product + b.double(), inner=10)


def test_logits_are_float32(kernels: str, dtype: str) -> None:
    x, w = values(3, 64, dtype=dtype), values(300, 64, dtype=dtype, seed=1)
    logits = KERNEL_SETS[kernels].logits(x, w)
    assert logits.dtype == torch.float32
    assert_close(logits.to(DTYPES[dtype]), x.double() @ w.double().T, inner=10)


def test_rms_norm(kernels: str, dtype: str) -> None:
    x, w = values(5, 7, 64, dtype=dtype) * 3, values(64, dtype=dtype, seed=1)
    normed = x.double() / torch.sqrt(x.double().square().mean(-1, keepdim=True) + 0.25)
    assert_close(KERNEL_SETS[kernels].rms_norm(x, w, 0.25), normed * w.double(), roundings=2)
    assert_close(KERNEL_SETS[kernels].rms_norm(x, w, 0.25, unit_offset=True), normed * (1 + w.double()), roundings=2)


def test_rms_norm_of_a_strided_tensor(kernels: str, dtype: str) -> None:
    x, w = values(6, 3, 64, dtype=dtype), values(64, dtype=dtype, seed=1)
    norm = KERNEL_SETS[kernels].rms_norm
    assert torch.equal(norm(x.transpose(0, 1), w, 1e-6), norm(x.transpose(0, 1).contiguous(), w, 1e-6))


def test_add_rms_norm(kernels: str, dtype: str) -> None:
    x, residual, w = values(5, 64, dtype=dtype), values(5, 64, dtype=dtype, seed=1), values(64, dtype=dtype, seed=2)
    normed, total = KERNEL_SETS[kernels].add_rms_norm(x, residual, w, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, KERNEL_SETS[kernels].rms_norm(total, w, 1e-6))


def test_rope_rotates_each_pair(kernels: str, dtype: str) -> None:
    x = values(3, 2, 8, dtype=dtype)
    positions, inv_freq = torch.tensor([0, 7, 300]), torch.tensor([1.0, 0.1, 0.01, 0.001])
    cos, sin = KERNEL_SETS[kernels].rope_tables(positions, inv_freq, 1.5)
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    turned = pairs * torch.polar(torch.tensor(1.5).double(), positions[:, None, None].double() * inv_freq.double())
    rotated = KERNEL_SETS[kernels].apply_rope(x, cos, sin)
    assert_close(rotated, torch.cat([turned.real, turned.imag], dim=-1), inner=100)


def test_gated_activations(kernels: str, dtype: str) -> None:
    gate, up = values(9, 112, dtype=dtype) * 4, values(9, 112, dtype=dtype, seed=1)
    gate[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -20.0])
    wide, other = gate.double(), up.double()
    assert_close(KERNEL_SETS[kernels].silu_and_mul(gate, up), F.silu(wide) * other, roundings=3)
    gelu = F.gelu(wide, approximate="tanh") * other
    assert_close(KERNEL_SETS[kernels].gelu_tanh_and_mul(gate, up), gelu, inner=10)


def test_soft_cap(kernels: str, dtype: str) -> None:
    x = values(9, 33, dtype=dtype) * 40
    assert_close(KERNEL_SETS[kernels].soft_cap(x, 30.0), torch.tanh(x.double() / 30) * 30, roundings=2)


def test_embedding(kernels: str, dtype: str) -> None:
    w = values(30, 16, dtype=dtype)
    ids = torch.tensor([3, 29, 3, 0])
    assert torch.equal(KERNEL_SETS[kernels].embedding(ids, w), w[ids])
    assert torch.equal(KERNEL_SETS[kernels].embedding(ids, w, 25.3), w[ids] * torch.tensor(25.3).to(w.dtype))


def test_copy_blocks_in_order(kernels: str, dtype: str) -> None:
    blocks = values(5, 2, 3, dtype=dtype)
    before = blocks.clone()
    KERNEL_SETS[kernels].copy_blocks(blocks, [(0, 1), (1, 2)])
    assert torch.equal(blocks, before[[0, 0, 0, 3, 4]])
