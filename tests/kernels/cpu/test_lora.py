"""Native adapters: against float64, any company, and a gated projection whose other rows keep their bits."""

from typing import Literal

import pytest
import torch

import kernels.cpu
from kernels.cpu.native import NativeKernels
from kernels.lora import LoraStack
from tests.kernels.cpu.harness import UNIT, assert_same_bits, assert_within, case, normal
from tests.kernels.lora_cases import expected, make_stack, of_rows

SLOTS = [(0, 1, -1, 3, 4, 3, 2)[i * i % 7] for i in range(41)]


def _bound(wanted: torch.Tensor, dtype: torch.dtype, depth: int) -> torch.Tensor:
    return 4 * UNIT[torch.float32] * (depth + 16) ** 0.5 * (wanted.abs() + 4) + UNIT[dtype] * wanted.abs() * 1.01


def test_agrees_with_float64_in_any_company(native: NativeKernels, dtype: torch.dtype) -> None:
    for widths, depth in (((48, 20, 33), 64), ((40,), 75), ((130, 7), 600)):
        stack = make_stack(widths, depth, dtype)
        x = normal(len(SLOTS), depth, dtype=dtype, seed=1)
        for out_dtype in dict.fromkeys((dtype, torch.float32)):
            base = normal(len(SLOTS), sum(widths), dtype=out_dtype, seed=2)
            lora = of_rows(stack, SLOTS)
            assert lora is not None
            y = base.clone()
            native.lora(y, x, lora)
            wanted = expected(base, x, stack, SLOTS)
            with case(widths, depth, out_dtype):
                assert_within(y, wanted, _bound(wanted, out_dtype, depth))
                for rows in ([0], [1], [3], [4, 9, 2], list(range(3, 37))):
                    some = base[rows].clone()
                    if (part := of_rows(stack, [SLOTS[row] for row in rows])) is not None:
                        native.lora(some, x[rows], part)
                    assert_same_bits(some, y[rows])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gated_projection_keeps_the_bits_of_rows_without_adapter(
    native: NativeKernels, dtype: torch.dtype, activation: Literal["silu", "gelu_tanh"]
) -> None:
    for columns, depth in ((112, 64), (50, 70), (96, 1700)):
        x = normal(len(SLOTS), depth, dtype=dtype, seed=1)
        gate, up = (normal(columns, depth, dtype=dtype, seed=s, scale=depth**-0.5) for s in (2, 3))
        biases = [normal(columns, dtype=dtype, seed=s) for s in (4, 5)]
        packed = native.pack(gate, up, biases=biases, gated=True)
        stack = make_stack((columns, columns), depth, dtype)
        lora = of_rows(stack, SLOTS)
        out, plain = native.gated_linear(x, packed, activation, lora=lora), native.gated_linear(x, packed, activation)
        without = [row for row, slot in enumerate(SLOTS) if slot in (-1, 2)]
        with case(columns, depth):
            assert_same_bits(out[without], plain[without])
            for rows in ([0], [3], [4, 9, 2]):
                part = of_rows(stack, [SLOTS[row] for row in rows])
                assert_same_bits(native.gated_linear(x[rows], packed, activation, lora=part), out[rows])
            sums = torch.cat(
                [x.double() @ w.double().t() + b.double() for w, b in zip((gate, up), biases, strict=True)], 1
            )
            both = expected(sums, x, stack, SLOTS)
            g, u = both.chunk(2, dim=1)
            activated = (
                torch.nn.functional.silu(g) if activation == "silu" else torch.nn.functional.gelu(g, approximate="tanh")
            )
            error = 60 * UNIT[torch.float32] * depth**0.5 * (1 + g.abs()) * (1 + u.abs())
            assert_within(out, activated * u, error + UNIT[dtype] * (activated * u).abs() * 1.02)


def test_the_number_of_threads_changes_nothing(native: NativeKernels, dtype: torch.dtype) -> None:
    x = normal(len(SLOTS), 640, dtype=dtype, seed=1)
    lora = of_rows(make_stack((512, 512), 640, dtype), SLOTS)
    assert lora is not None
    results = []
    for threads in (1, 3):
        kernels.cpu.load().configure_threads(threads)
        y = torch.zeros(len(SLOTS), 1024, dtype=dtype)
        native.lora(y, x, lora)
        results.append(y)
    assert_same_bits(*results)


def test_what_does_not_fit_is_refused(native: NativeKernels) -> None:
    stack: LoraStack = make_stack((40,), 64, torch.float32)
    lora = of_rows(stack, [0])
    assert lora is not None
    with pytest.raises(ValueError, match="don't fit adapters"):
        native.lora(torch.zeros(1, 40), torch.zeros(1, 63), lora)
