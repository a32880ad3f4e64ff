"""Rows a line further apart than they are long: who makes them, and that whoever reads them gets what is in them."""

import torch

from kernels.cpu.native import NativeKernels
from kernels.cpu.spaced_rows import spaced_rows
from tests.kernels.cpu.harness import assert_same_bits, case, normal


def test_only_many_rows_that_would_crowd_are_spaced() -> None:
    for num_rows, size, dtype, stride in (
        (9, 512, torch.bfloat16, 544), (9, 256, torch.float32, 272), (8, 512, torch.bfloat16, 512),
        (9, 640, torch.bfloat16, 640), (0, 512, torch.float32, 512),
    ):  # fmt: skip
        with case(num_rows, size, dtype):
            rows = spaced_rows(num_rows, size, dtype)
            assert rows.shape == (num_rows, size)
            assert rows.stride(0) == stride


def test_ops_read_and_write_them(native: NativeKernels, dtype: torch.dtype) -> None:
    size, num_rows = 1024 // dtype.itemsize, 40
    x, residual = spaced_rows(num_rows, size, dtype), normal(num_rows, size, dtype=dtype, seed=2)
    x.copy_(normal(num_rows, size, dtype=dtype, seed=1))
    plain = x.contiguous()
    weights = [normal(size, size, dtype=dtype, seed=seed, scale=size**-0.5) for seed in (3, 4)]
    gate_up, down, norm = native.pack(*weights, gated=True), native.pack(weights[0]), weights[1][0]
    activated = native.gated_linear(x, gate_up, "silu")
    normed, (added, total) = native.rms_norm(x, norm, 1e-6), native.add_rms_norm(x, residual, norm, 1e-6)
    for made in (activated, normed, added):
        assert made.stride(0) > size
    assert_same_bits(activated, native.gated_linear(plain, gate_up, "silu"))
    assert_same_bits(native.linear(activated, down), native.linear(activated.contiguous(), down))
    assert_same_bits(normed, native.rms_norm(plain, norm, 1e-6))
    for one, other in zip((added, total), native.add_rms_norm(plain, residual, norm, 1e-6), strict=True):
        assert_same_bits(one, other)
