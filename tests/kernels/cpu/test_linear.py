"""Packed linear: against float64, fused epilogues, and each row bit for bit the same in any company."""

from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

import kernels.cpu
from kernels import reference
from kernels.cpu.native import NativeKernels
from tests.kernels.cpu.harness import UNIT, assert_same_bits, assert_within, case, normal

SHAPES = [  # rows, columns, depth: ones, odd ones, whole panels and not, K in several pieces, several row blocks
    (1, 1, 1), (1, 32, 32), (2, 33, 31), (3, 15, 64), (5, 48, 112), (12, 96, 896), (13, 64, 96),
    (16, 100, 2), (17, 300, 64), (32, 17, 1600), (33, 64, 4864), (65, 130, 100), (300, 40, 1664), (577, 33, 48),
]  # fmt: skip


def _chain_error(x: Tensor, weight: Tensor) -> Tensor:
    """Of a chain of K float32 additions, what sqrt(K) of them make when they err either way.

    A wrong or missing term shows: it is about 1/K of the sum of magnitudes, 40 times this at K = 4864.
    """
    magnitude = x.double().abs() @ weight.double().abs().T
    return magnitude * (UNIT[torch.float32] * (float(x.shape[1]) ** 0.5 + 8))


def test_agrees_with_float64(native: NativeKernels, dtype: torch.dtype) -> None:
    for rows, columns, depth in SHAPES:
        x = normal(rows, depth, dtype=dtype, seed=1)
        weight = normal(columns, depth, dtype=dtype, seed=2, scale=depth**-0.5)
        expected = x.double() @ weight.double().T
        error = _chain_error(x, weight)
        with case(rows, columns, depth):
            result = native.linear(x, native.pack(weight))
            assert_within(result, expected, error + UNIT[dtype] * expected.abs() * 1.01)
            logits = native.logits(x, native.pack(weight))
            assert logits.dtype == torch.float32
            assert_within(logits, expected, error)


def test_an_element_is_one_chain_of_fused_multiply_adds(native: NativeKernels, dtype: torch.dtype) -> None:
    """Over ascending k, however rows, columns and K are cut: what a block's bits, and so its key, rest on."""
    if dtype == torch.bfloat16 and native.isa not in ("avx512_vnni", "avx512", "avx2"):
        pytest.skip("adds pairs of products")
    for rows, columns, depth in ((1, 40, 96), (3, 64, 640), (7, 33, 1600), (40, 70, 4864), (200, 35, 640)):
        x = normal(rows, depth, dtype=torch.bfloat16, seed=1).to(dtype)  # products and sums are exact in float64
        weight = normal(columns, depth, dtype=torch.bfloat16, seed=2, scale=depth**-0.5).to(dtype)
        wide_x, wide_weight = x.double().numpy(), weight.double().numpy()
        chain = np.zeros((rows, columns), dtype=np.float32)
        for k in range(depth):
            chain = (chain + wide_x[:, k, None] * wide_weight[None, :, k]).astype(np.float32)
        with case(rows, columns, depth):
            assert_same_bits(native.logits(x, native.pack(weight)), torch.from_numpy(chain))


def test_bias_and_residual_are_added_before_the_one_rounding(native: NativeKernels, dtype: torch.dtype) -> None:
    for rows, columns, depth in ((1, 40, 64), (7, 33, 100), (37, 64, 1700)):
        x, residual = normal(rows, depth, dtype=dtype, seed=1), normal(rows, columns, dtype=dtype, seed=4)
        weight = normal(columns, depth, dtype=dtype, seed=2, scale=depth**-0.5)
        bias = normal(columns, dtype=dtype, seed=3)
        expected = x.double() @ weight.double().T + bias.double() + residual.double()
        error = _chain_error(x, weight) + UNIT[torch.float32] * 4 * (bias.double().abs() + residual.double().abs())
        with case(rows, columns, depth):
            result = native.linear(x, native.pack(weight, biases=[bias]), residual=residual)
            assert_within(result, expected, error + UNIT[dtype] * expected.abs() * 1.01)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activation(native: NativeKernels, dtype: torch.dtype, activation: Literal["silu", "gelu_tanh"]) -> None:
    oracle = reference.silu_and_mul if activation == "silu" else reference.gelu_tanh_and_mul
    for rows, columns, depth in ((1, 16, 32), (9, 50, 70), (40, 112, 1700)):
        x = normal(rows, depth, dtype=dtype, seed=1, scale=4)
        gate, up = (normal(columns, depth, dtype=dtype, seed=s, scale=depth**-0.5) for s in (2, 3))
        biases = [normal(columns, dtype=dtype, seed=s) for s in (4, 5)]
        wide_gate, wide_up = (x.double() @ w.double().T + b.double() for w, b in ((gate, biases[0]), (up, biases[1])))
        expected = oracle(wide_gate, wide_up)
        # The activations' slopes are below 1.2, so an error of the gate arrives 1.2 |up| times as large at most.
        error = 1.2 * (_chain_error(x, gate) + 1e-6) * wide_up.abs() + _chain_error(x, up) * wide_gate.abs() + 1e-6
        with case(rows, columns, depth):
            result = native.gated_linear(x, native.pack(gate, up, biases=biases, gated=True), activation)
            assert_within(result, expected, error + UNIT[dtype] * expected.abs() * 1.01)


def test_weights_packed_together_are_one_below_the_other(native: NativeKernels, dtype: torch.dtype) -> None:
    x = normal(6, 48, dtype=dtype, seed=1)
    for sizes in ((32, 16, 16), (7, 40, 3)):
        weights = [normal(n, 48, dtype=dtype, seed=n) for n in sizes]
        biases = [normal(n, dtype=dtype, seed=100 + n) for n in sizes]
        together = native.linear(x, native.pack(*weights, biases=biases))
        apart = [native.linear(x, native.pack(w, biases=[b])) for w, b in zip(weights, biases, strict=True)]
        assert_same_bits(together, torch.cat(apart, dim=1))


@pytest.mark.parametrize("depth", [64, 100, 4864])
def test_a_row_is_the_same_in_any_company(native: NativeKernels, dtype: torch.dtype, depth: int) -> None:
    weight = native.pack(normal(80, depth, dtype=dtype, seed=2), biases=[normal(80, dtype=dtype, seed=3)])
    x = normal(300, depth, dtype=dtype, seed=1)
    alone = torch.cat([native.linear(x[i : i + 1], weight) for i in range(34)])
    for count in (2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 17, 25, 32, 33):
        assert_same_bits(native.linear(x[:count], weight), alone[:count])
        assert_same_bits(native.linear(x[34 - count : 34], weight), alone[34 - count :])
    assert_same_bits(native.linear(x, weight)[:34], alone)


def test_threads_and_layout_of_the_input_change_nothing(native: NativeKernels, dtype: torch.dtype) -> None:
    weight = native.pack(normal(700, 96, dtype=dtype, seed=2))
    wide = normal(40, 200, dtype=dtype, seed=1)
    x = wide[:, 3:99]
    two = native.linear(x, weight)
    assert_same_bits(native.linear(x.contiguous(), weight), two)
    assert_same_bits(native.linear(x.T.contiguous().T, weight), two)
    for num_threads in (1, 3):
        kernels.cpu.load().configure_threads(num_threads)
        assert_same_bits(native.linear(x, weight), two)


def test_a_plain_weight_is_packed_once_and_let_go_with_it(native: NativeKernels) -> None:
    weight, x = normal(20, 30, dtype=torch.float32, seed=1), normal(2, 30, dtype=torch.float32, seed=2)
    first = native.linear(x, weight)
    assert_same_bits(native.linear(x, native.pack(weight)), first)
    assert len(native._packed) == 1
    native.linear(x, weight)
    assert len(native._packed) == 1
    del weight
    assert not native._packed


def test_a_weight_can_be_packed_into_a_given_buffer(native: NativeKernels, dtype: torch.dtype) -> None:
    weight = normal(40, 50, dtype=dtype, seed=1)
    made = native.pack(weight)
    buffer = torch.zeros(made.data.numel(), dtype=torch.uint8)
    assert native.pack(weight, out=buffer).data.data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer, made.data)
    with pytest.raises(ValueError, match="needs"):
        native.pack(weight, out=buffer[:-64])


def test_misuse_is_refused(native: NativeKernels) -> None:
    weight = native.pack(normal(40, 50, dtype=torch.float32, seed=1))
    with pytest.raises(ValueError, match="don't fit"):
        native.linear(torch.zeros(1, 51), weight)
    with pytest.raises(ValueError, match="don't fit"):
        native.linear(torch.zeros(1, 50, dtype=torch.bfloat16), weight)
    with pytest.raises(ValueError, match="don't fit"):
        native.gated_linear(torch.zeros(1, 50), weight, "silu")
    with pytest.raises(ValueError, match="can't be packed"):
        native.pack(torch.zeros(3, 4, dtype=torch.float16))


def test_embedding_reads_the_packed_weight(native: NativeKernels, dtype: torch.dtype) -> None:
    for depth in (64, 50, 7):
        weight = normal(100, depth, dtype=dtype, seed=1)
        ids = torch.tensor([0, 99, 31, 32, 15, 16, 31])
        packed = native.pack(weight)
        assert torch.equal(native.embedding(ids, packed), reference.embedding(ids, weight))
        assert torch.equal(native.embedding(ids, packed, 25.3), reference.embedding(ids, weight, 25.3))
    with pytest.raises(IndexError):
        native.embedding(torch.tensor([100]), packed)
