"""RMSNorm and the gated activations against the reference, and rows independent of each other."""

import pytest
import torch

from kernels import reference
from kernels.cpu.native import NativeKernels
from tests.kernels.cpu.harness import UNIT, assert_same_bits, assert_within, case, normal

SHAPES = [(1, 1), (3, 7), (2, 64), (9, 112), (5, 896), (130, 300), (4, 3, 80)]


@pytest.mark.parametrize("unit_offset", [False, True])
def test_agrees_with_the_reference(native: NativeKernels, dtype: torch.dtype, unit_offset: bool) -> None:
    for shape in SHAPES:
        x, residual = normal(*shape, dtype=dtype, seed=1, scale=3), normal(*shape, dtype=dtype, seed=2)
        weight = normal(shape[-1], dtype=dtype, seed=3)
        normed, total = native.add_rms_norm(x, residual, weight, 1e-6, unit_offset=unit_offset)
        assert_same_bits(total, x + residual)
        for result, source in ((normed, total), (native.rms_norm(x, weight, 1e-6, unit_offset=unit_offset), x)):
            expected = reference.rms_norm(source.double(), weight.double(), 1e-6, unit_offset=unit_offset)
            # One rounding, before it a handful of float32 ones; 1 + w may cancel, hence the part of x alone.
            bound = UNIT[dtype] * expected.abs() * 1.01 + UNIT[torch.float32] * 8 * (
                expected.abs() + source.double().abs()
            )
            with case(*shape):
                assert_within(result, expected, bound + 1e-30)


def test_a_row_is_the_same_in_any_company(native: NativeKernels, dtype: torch.dtype) -> None:
    x, weight = normal(200, 300, dtype=dtype, seed=1), normal(300, dtype=dtype, seed=2)
    together = native.rms_norm(x, weight, 1e-5)
    assert_same_bits(torch.cat([native.rms_norm(x[i : i + 1], weight, 1e-5) for i in range(200)]), together)


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activations(native: NativeKernels, dtype: torch.dtype, name: str) -> None:
    edges = torch.tensor([0.0, -0.0, 1e-3, -1e-3, 0.5, 20.0, -20.0, 89.0, -89.0, 1e4, -1e4, 3e38, -3e38]).to(dtype)
    for gate in (edges[None], normal(150, 301, dtype=dtype, seed=1, scale=4)):
        up = normal(*gate.shape, dtype=dtype, seed=2)
        result = getattr(native, name)(gate, up)
        expected = getattr(reference, name)(gate.double(), up.double())
        # A few float32 roundings of values and of the exponent's argument (up to 88 in size), then the result's own.
        # silu is 0 where exp overflows (below -88.7), and float64's own 1 + tanh is off by 1e-16 |x|.
        absolute = 1e-36 if name == "silu_and_mul" else 1e-14 * (1 + up.double().abs().amax())
        bound = UNIT[dtype] * expected.abs() * 1.01 + UNIT[torch.float32] * 100 * expected.abs() + absolute
        keep = expected.abs() < torch.finfo(dtype).max
        assert_within(result[keep], expected[keep], bound[keep])
        assert_same_bits(getattr(native, name)(gate[:1], up[:1]), result[:1])
