"""Weights with scales for groups of columns: within float32's error of the oracle, rows the same in any company.

Where x goes in fixed point the oracle's x is that too (kernels/grouped.py), so that the bounds stay those of float32.
"""

import itertools
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import kernels.cpu
from kernels import reference
from kernels.cpu.native import NativeKernels
from kernels.cpu.packed_parts import PackedParts
from kernels.grouped import RANGES, GroupedMatrix, KScales, Numbers, in_fixed_point
from kernels.int8 import Quantization
from tests.kernels.cpu.harness import DTYPES, UNIT, assert_same_bits, assert_within, case, normal

SHAPES = [  # rows, columns, depth, group: panels, blocks and groups whole and not, groups over pieces of 256 and within
    (1, 1, 8, 32), (1, 33, 128, 128), (2, 15, 200, 64), (3, 300, 96, 32), (4, 32, 640, 384), (6, 40, 896, 896),
    (7, 64, 257, 64), (13, 17, 384, 128), (65, 130, 160, 32), (300, 40, 1664, 640), (40, 33, 520, 4096),
]  # fmt: skip
KINDS: tuple[Numbers, ...] = ("int4", "int8", "fp8", "int5")
K_KINDS: tuple[Numbers, ...] = ("uint4", "uint5", "int6")
Act = Literal["silu", "gelu_tanh"]


def matrix(
    kind: Numbers, rows: int, columns: int, group: int, *, seed: int, offsets: bool = True, order: bool = False
) -> GroupedMatrix:
    """Random numbers of every value, with scales that differ and offsets as zero points make them."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "fp8":
        codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.int16)
        numbers = codes.where(codes % 128 != 127, 0).to(torch.uint8).view(torch.float8_e4m3fn)
    else:
        low, limit = RANGES[kind]
        numbers = torch.randint(low, limit + 1, (rows, columns), generator=generator, dtype=torch.int16).char()
    size = (rows, -(-columns // group))
    largest = 100 if kind == "fp8" else limit
    scales = (torch.rand(size, generator=generator) + 0.5) * columns**-0.5 / largest
    zeros = torch.randint(-7, 9, size, generator=generator)
    return GroupedMatrix(
        kind, numbers, scales, group, -zeros * scales if offsets else None,
        torch.randperm(columns, generator=generator) if order else None,
    )  # fmt: skip


def k_matrix(kind: Numbers, rows: int, columns: int, *, seed: int) -> GroupedMatrix:
    """Random numbers and codes of every value, as llama.cpp's K types have them."""
    generator = torch.Generator().manual_seed(seed)
    low, high = RANGES[kind]
    numbers = torch.randint(low, high + 1, (rows, columns), generator=generator, dtype=torch.int8)
    upper = [(torch.rand(rows, columns // 256, generator=generator) * 1e-3).half() for _ in range(2)]
    if kind == "int6":
        lower = torch.randint(-128, 128, (rows, columns // 16), generator=generator, dtype=torch.int16).char()
        return GroupedMatrix.of_levels(kind, numbers, KScales(upper[0], lower))
    codes = [torch.randint(0, 64, (rows, columns // 32), generator=generator, dtype=torch.uint8) for _ in range(2)]
    return GroupedMatrix.of_levels(kind, numbers, KScales(upper[0], codes[0], upper[1], codes[1]))


def seen(native: NativeKernels, x: Tensor, weight: GroupedMatrix) -> Tensor:
    """x as the kernels compute with it."""
    kind = weight.kind
    on_tiles = x.dtype == torch.bfloat16 and native.isa.startswith("amx")
    if kind not in (*K_KINDS, "int5", *(("int4", "int8") if x.dtype == torch.bfloat16 and not on_tiles else ())):
        return x
    order = torch.arange(x.shape[1]) if weight.order is None else weight.order
    return in_fixed_point(x[:, order], 64 if kind == "int8" else 128)[:, order.argsort()]


def pack(native: NativeKernels, *weights: GroupedMatrix, dtype: torch.dtype, **more: object) -> Any:
    return native.pack_groups(*weights, dtype=dtype, **more)  # type: ignore[arg-type]


def product(x: Tensor, weight: GroupedMatrix) -> tuple[Tensor, Tensor]:
    """x Wᵀ in float64, and the error of float32's chain: numbers and offsets are added apart, so each counts whole."""
    wide = weight.dequantized().double()
    order = torch.arange(weight.shape[1]) if weight.order is None else weight.order
    groups = torch.arange(weight.shape[1]) // weight.group_size
    parts = weight.numbers.double().abs() * weight.scales.double().abs()[:, groups]
    if weight.offsets is not None:
        parts += weight.offsets.double().abs()[:, groups]
    magnitude = x.double().abs()[:, order] @ parts.T
    return x.double() @ wide.T, magnitude * (UNIT[torch.float32] * (float(x.shape[1]) ** 0.5 + 10)) + 1e-30


def test_no_rows_have_no_result(native: NativeKernels) -> None:
    """Of every kind of weight; the result is empty, and the process lives on."""
    x = torch.empty(0, 64)
    quantizations: tuple[Quantization | None, ...] = (None, "int8", "w8a8")
    for quantization in quantizations:
        native = NativeKernels(kernels.cpu.load(), quantization)
        dense, grouped = normal(48, 64, dtype=torch.float32, seed=1), matrix("int4", 48, 64, 32, seed=1, order=True)
        for weight, gated in (
            (native.pack(dense), native.pack(dense, dense, gated=True)),
            (pack(native, grouped, dtype=x.dtype), pack(native, grouped, grouped, dtype=x.dtype, gated=True)),
        ):
            assert native.linear(x, weight, residual=torch.empty(0, 48)).shape == (0, 48)
            assert native.logits(x, weight).shape == (0, 48)
            assert native.gated_linear(x, gated, "silu").shape == (0, 48)
        assert native.router_logits(x, dense).shape == (0, 48)


def test_agrees_with_the_dequantized_weight(native: NativeKernels) -> None:
    for number, (kind, dtype, shape) in enumerate(itertools.product(KINDS, DTYPES, SHAPES)):
        rows, columns, depth, group = shape
        weight = matrix(kind, columns, depth, group, seed=2, offsets=number % 3 > 0, order=number % 4 == 1)
        x = normal(rows, depth, dtype=dtype, seed=1)
        bias, residual = normal(columns, dtype=dtype, seed=3), normal(rows, columns, dtype=dtype, seed=4)
        expected, error = product(seen(native, x, weight), weight)
        with case(kind, dtype, rows, columns, depth, group):
            assert_within(native.logits(x, pack(native, weight, dtype=dtype)), expected, error)
            expected = expected + bias.double() + residual.double()
            error = error + UNIT[torch.float32] * 4 * (bias.double().abs() + residual.double().abs())
            result = native.linear(x, pack(native, weight, dtype=dtype, biases=[bias]), residual=residual)
            assert_within(result, expected, error + UNIT[dtype] * expected.abs() * 1.01)


def test_scales_of_two_levels(native: NativeKernels) -> None:
    for kind, dtype, (rows, columns, depth) in itertools.product(
        K_KINDS, DTYPES, ((1, 70, 256), (3, 16, 768), (13, 33, 512), (40, 40, 1024))
    ):
        weight = k_matrix(kind, columns, depth, seed=1)
        x = normal(rows, depth, dtype=dtype, seed=1)
        bias = normal(columns, dtype=dtype, seed=3)
        packed = pack(native, weight, dtype=dtype, biases=[bias])
        expected, error = product(seen(native, x, weight), weight)
        with case(kind, dtype, rows, columns, depth):
            result = native.logits(x, packed)
            assert_within(result, expected + bias.double(), error + UNIT[torch.float32] * 4 * bias.double().abs())
            for row in range(0, rows, 3):
                assert_same_bits(native.logits(x[row : row + 1], packed), result[row : row + 1])
            ids = torch.tensor([0, columns - 1, 5, 15])
            found = native.embedding(ids, pack(native, weight, dtype=dtype))
            assert_same_bits(found, weight.dequantized()[ids].to(dtype))


def test_what_differs_lies_side_by_side(native: NativeKernels) -> None:
    """Kinds, groups and orders of columns; alike neighbours are one part."""
    weights = [
        k_matrix("uint4", 32, 256, seed=1),
        k_matrix("uint4", 7, 256, seed=2),
        k_matrix("int6", 40, 256, seed=3),
        matrix("int4", 3, 256, 64, seed=4),
        matrix("int4", 33, 256, 64, seed=5, order=True),
        matrix("fp8", 16, 256, 128, seed=6),
    ]
    for dtype, rows in itertools.product(DTYPES, (1, 19)):
        x, residual = normal(rows, 256, dtype=dtype, seed=1), normal(rows, 131, dtype=dtype, seed=2)
        biases = [normal(len(weight.numbers), dtype=dtype, seed=len(weight.numbers)) for weight in weights]
        together = pack(native, *weights, dtype=dtype, biases=biases)
        assert isinstance(together, PackedParts)
        assert [part.num_out for part in together.parts] == [39, 40, 3, 33, 16]
        pairs = zip(weights, biases, residual.split([len(weight.numbers) for weight in weights], 1), strict=True)
        apart = [native.linear(x, pack(native, w, dtype=dtype, biases=[b]), residual=r) for w, b, r in pairs]
        with case(dtype, rows):
            assert_same_bits(native.linear(x, together, residual=residual), torch.cat(apart, dim=1))


def test_what_is_joined_has_its_scales_of_two_levels(native: NativeKernels) -> None:
    dtype = torch.bfloat16
    x = normal(5, 256, dtype=dtype, seed=1)
    for kind, sizes in itertools.product(K_KINDS, ((32, 16, 16), (7, 40, 3))):
        weights = [k_matrix(kind, n, 256, seed=n) for n in sizes]
        apart = [native.linear(x, pack(native, weight, dtype=dtype)) for weight in weights]
        with case(kind, sizes):
            assert_same_bits(native.linear(x, pack(native, *weights, dtype=dtype)), torch.cat(apart, dim=1))
        gate, up = k_matrix(kind, 40, 256, seed=1), k_matrix(kind, 40, 256, seed=2)
        packed = pack(native, gate, up, dtype=torch.float32, gated=True)
        parts = [native.linear(x.float(), pack(native, each, dtype=torch.float32)).double() for each in (gate, up)]
        expected = reference.silu_and_mul(*parts)
        assert_within(native.gated_linear(x.float(), packed, "silu"), expected, expected.abs() * 1e-5 + 1e-5)


def test_fixed_point_is_exact_near_the_largest_and_close_below(native: NativeKernels) -> None:
    """What a row's block rounds to: as the docs say."""
    x = normal(4, 300, dtype=torch.bfloat16, seed=1)
    x[1, 5], x[2] = 1000.0, 0.0
    fixed = in_fixed_point(x, 128)
    blocks = (
        torch.nn.functional.pad(x.double(), (0, 84)).view(4, 3, 128).abs().amax(2).repeat_interleave(128, 1)[:, :300]
    )
    assert ((fixed - x.double()).abs() <= blocks * 2.0**-15).all()
    near = x.double().abs() >= blocks * 2.0**-7
    assert torch.equal(fixed[near], x.double()[near])


def test_every_number_is_exact(native: NativeKernels) -> None:
    """One column at a time: a product of one number, its scale and 1 is what the oracle has, to the bit."""
    for dtype, kind in itertools.product(DTYPES, KINDS):
        weight = matrix(kind, 300, 128, 128, seed=1, offsets=False)
        for rows in (1, 128):  # from registers and from scratch
            result = native.logits(torch.eye(128, dtype=dtype)[:rows], pack(native, weight, dtype=dtype))
            with case(dtype, kind, rows):
                assert torch.equal(result, weight.dequantized().T[:rows])


def test_subnormal_input_and_scales_count_for_nothing(native: NativeKernels, dtype: torch.dtype) -> None:
    """As everywhere, and in any number of rows, although FP8's numbers may become subnormal ones on their way."""
    largest = torch.full((40, 256), 448.0).to(torch.float8_e4m3fn)
    for rows, tiny_scale in itertools.product((1, 2, 3, 4, 40), (False, True)):
        scales = torch.full((40, 2), 1e-39 if tiny_scale else 1.0)
        packed = pack(native, GroupedMatrix("fp8", largest, scales, 128), dtype=dtype)
        x = torch.full((rows, 256), 1.0 if tiny_scale else 1e-39, dtype=dtype)
        with case(rows, tiny_scale):
            assert not native.logits(x, packed).any()


def test_the_largest_sums_fit(native: NativeKernels, dtype: torch.dtype) -> None:
    """Every number and every x the largest of their kind: sums of a group's products stay within 32 bits."""
    largest = 2 - (2.0**-7 if dtype == torch.bfloat16 else 2.0**-14)  # in fixed point 32640, 32767
    weights = [matrix(kind, 40, 256, 128, seed=1) for kind in RANGES]
    weights += [k_matrix(kind, 40, 256, seed=1) for kind in K_KINDS]
    for weight, end in itertools.product(weights, (0, 1)):
        extreme = replace(weight, numbers=torch.full_like(weight.numbers, RANGES[weight.kind][end]))
        packed = pack(native, extreme, dtype=dtype)
        for rows, sign in itertools.product((1, 2, 3, 9), (1.0, -1.0)):
            x = torch.full((rows, 256), sign * largest, dtype=dtype)
            expected, error = product(x, extreme)
            with case(weight.kind, weight.group_size, end, rows, sign):
                assert_within(native.logits(x, packed), expected, error)


def test_a_row_is_the_same_in_any_company(native: NativeKernels) -> None:
    for kind, dtype, (depth, group) in itertools.product(
        KINDS, DTYPES, ((64, 32), (200, 64), (1664, 640), (1024, 128))
    ):
        stored = matrix(kind, 80, depth, group, seed=2, order=group == 64)
        weight = pack(native, stored, dtype=dtype, biases=[normal(80, dtype=dtype, seed=3)])
        x = normal(300, depth, dtype=dtype, seed=1)
        alone = torch.cat([native.linear(x[i : i + 1], weight) for i in range(34)])
        with case(kind, dtype, depth, group):
            for count in (2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 32, 33):
                assert_same_bits(native.linear(x[:count], weight), alone[:count])
                assert_same_bits(native.linear(x[34 - count : 34], weight), alone[34 - count :])
            for count in (64, 65, 300):
                assert_same_bits(native.linear(x[:count], weight)[:34], alone)


def test_gated_activation(native: NativeKernels) -> None:
    """Against the oracle's gate and up, whose errors the activation's slope (below 1.2) passes on."""
    activations: tuple[Act, ...] = ("silu", "gelu_tanh")
    shapes = ((1, 16, 64), (5, 50, 96), (40, 112, 640))
    for dtype, activation, (rows, columns, depth) in itertools.product(DTYPES, activations, shapes):
        oracle = reference.silu_and_mul if activation == "silu" else reference.gelu_tanh_and_mul
        x = normal(rows, depth, dtype=dtype, seed=1, scale=4)
        pair = [matrix("int4", columns, depth, 32, seed=s, offsets=s == 2) for s in (2, 3)]
        biases = [normal(columns, dtype=dtype, seed=s) for s in (4, 5)]
        (gate, gate_error), (up, up_error) = (product(seen(native, x, weight), weight) for weight in pair)
        gate, up = gate + biases[0].double(), up + biases[1].double()
        expected = oracle(gate, up)
        error = 1.2 * (gate_error + 1e-6) * up.abs() + (up_error + 1e-6) * gate.abs() + 1e-6
        with case(dtype, activation, rows, columns, depth):
            packed = pack(native, *pair, dtype=dtype, biases=biases, gated=True)
            result = native.gated_linear(x, packed, activation)
            assert_within(result, expected, error + UNIT[dtype] * expected.abs() * 1.01)


def test_weights_packed_together_are_one_below_the_other(native: NativeKernels) -> None:
    dtype = torch.bfloat16
    x = normal(9, 96, dtype=dtype, seed=1)
    for sizes in ((32, 16, 16), (7, 40, 3)):
        weights = [matrix("int4", n, 96, 32, seed=n, offsets=n != 16) for n in sizes]
        biases = [normal(n, dtype=dtype, seed=100 + n) for n in sizes]
        together = native.linear(x, pack(native, *weights, dtype=dtype, biases=biases))
        pairs = zip(weights, biases, strict=True)
        apart = [native.linear(x, pack(native, w, dtype=dtype, biases=[b])) for w, b in pairs]
        assert_same_bits(together, torch.cat(apart, dim=1))


def test_threads_and_layout_of_the_input_change_nothing(native: NativeKernels) -> None:
    dtype = torch.bfloat16
    weight = pack(native, matrix("int4", 700, 96, 32, seed=2), dtype=dtype)
    x = normal(40, 200, dtype=dtype, seed=1)[:, 3:99]
    two = native.linear(x, weight)
    assert_same_bits(native.linear(x.contiguous(), weight), two)
    assert_same_bits(native.linear(x.T.contiguous().T, weight), two)
    for num_threads in (1, 3):
        kernels.cpu.load().configure_threads(num_threads)
        assert_same_bits(native.linear(x, weight), two)


def test_what_is_not_finite_spoils_its_row_alone(native: NativeKernels) -> None:
    """Of few rows and many, in fixed point too; the poisoned column may have a number of zero."""
    weights = {kind: matrix(kind, 40, 256, 32, seed=2) for kind in KINDS}
    weights |= {kind: k_matrix(kind, 40, 256, seed=2) for kind in K_KINDS}
    for (kind, weight), dtype, rows in itertools.product(weights.items(), DTYPES, (9, 30)):
        packed = pack(native, weight, dtype=dtype)
        x = normal(rows, 256, dtype=dtype, seed=1)
        clean = native.linear(x, packed)
        others = [i for i in range(rows) if i != 4]
        for poison in (torch.nan, torch.inf, -torch.inf):
            x[4, 170] = poison
            spoilt = native.linear(x, packed)
            with case(kind, dtype, rows, poison):
                assert not spoilt[4].isfinite().any()
                assert_same_bits(spoilt[others], clean[others])


def test_fixed_point_of_every_magnitude(native: NativeKernels) -> None:
    """Zeros, what is next to nothing and the largest there is: rows of one column's number are the oracle's x."""
    weight = GroupedMatrix("int5", torch.eye(128, dtype=torch.int8), torch.ones(128, 1), 128)
    for dtype in DTYPES:
        packed = pack(native, weight, dtype=dtype)
        signs = normal(1, 128, dtype=torch.float32, seed=1).sign()
        rows = [signs * 0, *(signs * 1.9921875 * 2.0**power for power in (-140, -126, -113, -112, -15, 0, 127))]
        x = torch.cat(rows).to(dtype)
        x[1:, 1] = 0.0
        x[1:, 2] /= 1024
        expected = seen(native, x, weight).double()
        if expected.equal(x.double()):  # tiles take the smallest numbers for zero
            expected[expected.abs() < 2.0**-126] = 0.0
        with case(dtype):
            assert torch.equal(native.logits(x, packed).double(), expected)


def test_embedding_reads_the_packed_weight(native: NativeKernels) -> None:
    ids = torch.tensor([0, 99, 31, 32, 15, 16, 31])
    for dtype, kind, (depth, group) in itertools.product(DTYPES, KINDS, ((64, 64), (130, 32))):
        weight = matrix(kind, 100, depth, group, seed=1)
        packed = pack(native, weight, dtype=dtype)
        for scale in (None, 25.3):
            factor = 1.0 if scale is None else torch.tensor(scale).to(dtype).float()
            expected = (weight.dequantized()[ids] * factor).to(dtype)
            with case(dtype, kind, depth, scale):
                assert_same_bits(native.embedding(ids, packed, scale), expected)


def test_what_does_not_fit_together_is_refused(native: NativeKernels) -> None:
    plain = matrix("int4", 16, 64, 32, seed=1)
    for other in (
        matrix("int8", 16, 64, 32, seed=1),
        matrix("int4", 16, 64, 64, seed=1),
        matrix("int4", 16, 64, 32, seed=1, order=True),
    ):
        with pytest.raises(ValueError, match="gate and up must have one kind of numbers, group size"):
            pack(native, plain, other, dtype=torch.float32, gated=True)
    reordered = pack(native, matrix("int4", 16, 64, 32, seed=1, order=True), dtype=torch.float32)
    with pytest.raises(ValueError, match="is no embedding"):
        native.embedding(torch.tensor([0]), reordered)
