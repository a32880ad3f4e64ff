"""int8 weights: integers equal the oracle to the bit, weight-only within float32's error of it, rows in any company."""

import itertools
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

import kernels.cpu
from kernels import int8, reference
from kernels.cpu.native import NativeKernels
from kernels.grouped import in_fixed_point
from tests.kernels.cpu.harness import DTYPES, UNIT, assert_same_bits, assert_within, case, normal

SHAPES = [  # rows, columns, depth: every way to take the rows, panels and blocks of 64 whole and not, many row blocks
    (1, 1, 1), (1, 33, 64), (2, 15, 65), (3, 300, 130), (4, 32, 63), (5, 48, 112), (6, 40, 896), (7, 64, 257),
    (13, 17, 100), (33, 96, 1600), (65, 130, 100), (300, 40, 1664), (577, 33, 48),
]  # fmt: skip
Act = Literal["silu", "gelu_tanh"]


def on(native: NativeKernels, quantization: int8.Quantization) -> NativeKernels:
    return NativeKernels(kernels.cpu.Extension(kernels.cpu.load().module, native.isa), quantization)


@pytest.fixture
def weight_only(native: NativeKernels) -> NativeKernels:
    return on(native, "int8")


@pytest.fixture
def integers(native: NativeKernels) -> NativeKernels:
    return on(native, "w8a8")


@pytest.fixture(params=["int8", "w8a8"])
def quantized(request: pytest.FixtureRequest, native: NativeKernels) -> NativeKernels:
    return on(native, request.param)


def matrices(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight = normal(columns, depth, dtype=dtype, seed=2, scale=depth**-0.5)
    weight[0] *= 100  # a scale of its own
    return normal(rows, depth, dtype=dtype, seed=1), weight


def seen(kernels: NativeKernels, x: Tensor) -> Tensor:
    """x as weight-only products have it: in fixed point but where bfloat16 has tiles (src/ops/fixed.h)."""
    if x.dtype == torch.float32 or kernels.isa.startswith("amx") or kernels.quantization != "int8":
        return x
    return in_fixed_point(x, 64)


def chain_error(x: Tensor, q: Tensor, scales: Tensor) -> Tensor:
    """As in test_linear.py; the scales round twice more."""
    magnitude = (x.double().abs() @ q.double().abs().T) * scales.double()
    return magnitude * (UNIT[torch.float32] * (float(x.shape[1]) ** 0.5 + 10))


def test_integers_equal_the_oracle(integers: NativeKernels) -> None:
    for dtype, (rows, columns, depth) in itertools.product(DTYPES, SHAPES):
        x, weight = matrices(rows, columns, depth, dtype)
        bias, residual = normal(columns, dtype=dtype, seed=3), normal(rows, columns, dtype=dtype, seed=4)
        expected = int8.linear_w8a8(x, *int8.quantize_weight(weight))
        with case(dtype, rows, columns, depth):
            assert_same_bits(integers.logits(x, integers.pack(weight)), expected)
            assert_same_bits(integers.linear(x, integers.pack(weight)), expected.to(dtype))
            result = integers.linear(x, integers.pack(weight, biases=[bias]), residual=residual)
            assert_same_bits(result, (expected + bias.float() + residual.float()).to(dtype))


def test_integers_at_their_limits(integers: NativeKernels) -> None:
    """All ±127, where pairs come closest to 16 bits and sums to 32; zeros, whose row has no scale."""
    for depth in (4096, 40000):
        signs = torch.where(torch.rand(6, depth, generator=torch.Generator().manual_seed(1)) < 0.5, -1.0, 1.0)
        x = torch.cat([signs, torch.ones(1, depth), torch.zeros(2, depth)])
        expected = int8.linear_w8a8(x, *int8.quantize_weight(x))
        assert expected.abs().max() == pytest.approx(depth, rel=1e-6)
        assert_same_bits(integers.logits(x, integers.pack(x)), expected)


def test_weight_only_agrees_with_float64(weight_only: NativeKernels) -> None:
    for dtype, (rows, columns, depth) in itertools.product(DTYPES, SHAPES):
        x, weight = matrices(rows, columns, depth, dtype)
        bias, residual = normal(columns, dtype=dtype, seed=3), normal(rows, columns, dtype=dtype, seed=4)
        q, scales = int8.quantize_weight(weight)
        expected, error = int8.linear(seen(weight_only, x), q, scales), chain_error(x, q, scales)
        with case(dtype, rows, columns, depth):
            assert_within(weight_only.logits(x, weight_only.pack(weight)), expected, error + 1e-30)
            expected = expected + bias.double() + residual.double()
            error = error + UNIT[torch.float32] * 4 * (bias.double().abs() + residual.double().abs())
            result = weight_only.linear(x, weight_only.pack(weight, biases=[bias]), residual=residual)
            assert_within(result, expected, error + UNIT[dtype] * expected.abs() * 1.01)


def test_gated_activation(quantized: NativeKernels) -> None:
    """Against the oracle's gate and up, whose errors the activation's slope (below 1.2) passes on."""
    product = int8.linear if quantized.quantization == "int8" else int8.linear_w8a8
    activations: tuple[Act, ...] = ("silu", "gelu_tanh")
    shapes = ((1, 16, 32), (5, 50, 70), (40, 112, 1700))
    for dtype, activation, (rows, columns, depth) in itertools.product(DTYPES, activations, shapes):
        oracle = reference.silu_and_mul if activation == "silu" else reference.gelu_tanh_and_mul
        x = normal(rows, depth, dtype=dtype, seed=1, scale=4)
        gate, up = (normal(columns, depth, dtype=dtype, seed=s, scale=depth**-0.5) for s in (2, 3))
        biases = [normal(columns, dtype=dtype, seed=s) for s in (4, 5)]
        pairs = [int8.quantize_weight(weight) for weight in (gate, up)]
        wide = [product(seen(quantized, x), *pair).double() + b.double() for pair, b in zip(pairs, biases, strict=True)]
        errors = [chain_error(x, *pair) + 1e-6 for pair in pairs]
        error = 1.2 * errors[0] * wide[1].abs() + errors[1] * wide[0].abs() + 1e-6
        expected = oracle(wide[0], wide[1])
        with case(dtype, activation, rows, columns, depth):
            result = quantized.gated_linear(x, quantized.pack(gate, up, biases=biases, gated=True), activation)
            assert_within(result, expected, error + UNIT[dtype] * expected.abs() * 1.01)


def test_weights_packed_together_are_one_below_the_other(quantized: NativeKernels) -> None:
    dtype = torch.bfloat16
    x = normal(6, 48, dtype=dtype, seed=1)
    for sizes in ((32, 16, 16), (7, 40, 3)):
        weights = [normal(n, 48, dtype=dtype, seed=n) for n in sizes]
        biases = [normal(n, dtype=dtype, seed=100 + n) for n in sizes]
        together = quantized.linear(x, quantized.pack(*weights, biases=biases))
        apart = [quantized.linear(x, quantized.pack(w, biases=[b])) for w, b in zip(weights, biases, strict=True)]
        assert_same_bits(together, torch.cat(apart, dim=1))


def test_a_row_is_the_same_in_any_company(quantized: NativeKernels) -> None:
    for dtype, depth in itertools.product(DTYPES, (64, 100, 4864)):
        weight = quantized.pack(normal(80, depth, dtype=dtype, seed=2), biases=[normal(80, dtype=dtype, seed=3)])
        x = normal(300, depth, dtype=dtype, seed=1)
        alone = torch.cat([quantized.linear(x[i : i + 1], weight) for i in range(34)])
        with case(dtype, depth):
            for count in (2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 32, 33):
                assert_same_bits(quantized.linear(x[:count], weight), alone[:count])
                assert_same_bits(quantized.linear(x[34 - count : 34], weight), alone[34 - count :])
            for count in (64, 65, 300):
                assert_same_bits(quantized.linear(x[:count], weight)[:34], alone)


def test_threads_and_layout_of_the_input_change_nothing(quantized: NativeKernels) -> None:
    dtype = torch.bfloat16
    weight = quantized.pack(normal(700, 96, dtype=dtype, seed=2))
    x = normal(40, 200, dtype=dtype, seed=1)[:, 3:99]
    two = quantized.linear(x, weight)
    assert_same_bits(quantized.linear(x.contiguous(), weight), two)
    assert_same_bits(quantized.linear(x.T.contiguous().T, weight), two)
    for num_threads in (1, 3):
        kernels.cpu.load().configure_threads(num_threads)
        assert_same_bits(quantized.linear(x, weight), two)


def test_what_is_not_finite_spoils_its_row_alone(quantized: NativeKernels) -> None:
    weight = quantized.pack(normal(40, 100, dtype=torch.float32, seed=2))
    x = normal(9, 100, dtype=torch.float32, seed=1)
    clean = quantized.linear(x, weight)
    others = [i for i in range(9) if i != 4]
    for poison in (torch.nan, torch.inf, -torch.inf):
        x[4, 70] = poison
        spoilt = quantized.linear(x, weight)
        assert not spoilt[4].isfinite().any()
        assert_same_bits(spoilt[others], clean[others])


def test_embedding_reads_the_packed_weight(quantized: NativeKernels) -> None:
    for dtype in DTYPES:
        for depth in (64, 50, 7, 130):
            weight = normal(100, depth, dtype=dtype, seed=1)
            ids = torch.tensor([0, 99, 31, 32, 15, 16, 31])
            packed = quantized.pack(weight)
            q, scales = int8.quantize_weight(weight)
            for scale in (None, 25.3):
                expected = int8.embedding(ids, q, scales, dtype, scale)
                assert_same_bits(quantized.embedding(ids, packed, scale), expected)


def test_what_has_no_int8_form_is_refused(quantized: NativeKernels) -> None:
    weight = torch.zeros(40, 8)
    weight[33, 5] = float("nan")
    with pytest.raises(ValueError, match="row 33 of a weight \\[40, 8\\] has an infinity or a NaN"):
        quantized.pack(weight)
    with pytest.raises(ValueError, match="131073 columns has no int8 form; at most 131072"):
        quantized.pack(torch.zeros(1, 131073))


@pytest.mark.parametrize("quantize", [lambda x: int8.quantize_weight(x), lambda x: int8.quantize_rows(x)])
def test_quantizing_errs_by_half_a_step_at_most(quantize: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    x = normal(20, 300, dtype=torch.float32, seed=1)
    x[3] = 0
    q, scales = quantize(x)
    error = (q.double() * scales.double()[:, None] - x.double()).abs()
    assert (error <= scales.double()[:, None] * 0.5001).all()
    assert (q.abs().amax(1) == torch.where(torch.arange(20) == 3, 0, 127)).all()
    assert q.min() >= -127
