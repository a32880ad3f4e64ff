"""Products in one call: the bits of a call of its own for each, over every way rows may fall on experts."""

from collections.abc import Sequence

import pytest
import torch

from kernels import routing
from kernels.cpu.native import NativeKernels
from kernels.products import Product
from kernels.routing import Routing
from tests.kernels.cpu.harness import assert_same_bits, case, normal

COUNTS: list[Sequence[int]] = [
    [1], [0, 1, 0], [0, 0, 37], [3, 0, 5, 1], [13, 12, 14, 1, 1], [300, 2, 600], [0, 0], [1] * 40,
]  # fmt: skip
"""Rows of each expert: none, one, all at one, more than a block of rows."""


class Calls:
    """Counts the native ones."""

    def __init__(self, native: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_together, original = 0, native._ops

        class Ops:
            def __getattr__(self, name: str) -> object:
                calls.num_together += name == "linear_each"
                return getattr(original, name)

        calls = self
        monkeypatch.setattr(native, "_ops", Ops())


def test_as_one_by_one(native: NativeKernels, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(native, monkeypatch)
    for (depth, columns), counts in ((shape, counts) for shape in ((64, 48), (1664, 40)) for counts in COUNTS):
        x = normal(sum(counts), depth, dtype=dtype, seed=1)
        gated = [native.pack(*(normal(columns, depth, dtype=dtype, seed=9 * i + j, scale=depth**-0.5) for j in (2, 3)),
                             gated=True) for i in range(len(counts))]  # fmt: skip
        plain = [native.pack(normal(columns, depth, dtype=dtype, seed=9 * i + 4)) for i in range(len(counts))]
        for weights, activation in ((gated, "silu"), (plain, None)):
            out, at, products = torch.full((sum(counts), columns), torch.nan, dtype=dtype), 0, []
            for weight, count in zip(weights, counts, strict=True):
                products.append(Product(x[at : at + count], weight, out[at : at + count]))
                at += count
            calls.num_together = 0
            native.linear_each(products, activation)  # type: ignore[arg-type]
            assert calls.num_together == bool(sum(counts))
            for each in products:
                alone = native._linear(each.x, each.weight, None, int(activation is not None), dtype)
                with case(depth, counts, activation):
                    assert_same_bits(each.out, alone)


def test_heads_of_a_row_and_what_has_to_be_padded(
    native: NativeKernels, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strided rows in and out; a depth that is not whole tiles, int8 and a weight of another shape go one by one."""
    calls = Calls(native, monkeypatch)
    for depth, is_together in ((64, True), (40, False)):
        x, out = normal(7, 3, depth + 5, dtype=dtype, seed=1), torch.zeros(7, 3, 50, dtype=dtype)
        weights = [native.pack(normal(48, depth, dtype=dtype, seed=head)) for head in range(3)]
        native.linear_each([Product(x[:, h, :depth], weights[h], out[:, h, :48]) for h in range(3)])
        assert bool(calls.num_together) == is_together
        for head in range(3):
            assert_same_bits(out[:, head, :48], native.linear(x[:, head, :depth].contiguous(), weights[head]))
        assert not out[..., 48:].any()
        calls.num_together = 0
    with pytest.raises(ValueError, match="don't fit a weight"):
        native.linear_each([Product(x[:, 0, :32], weights[0], out[:, 0, :48])])


def test_combine_is_the_references(native: NativeKernels, dtype: torch.dtype) -> None:
    for rows, top_k, size in ((1, 1, 1), (1, 6, 33), (5, 2, 48), (41, 8, 100), (300, 3, 257)):
        results = normal(rows * top_k, size, dtype=dtype, seed=1)
        experts = torch.randint(0, 9, (rows, top_k), generator=torch.Generator().manual_seed(2))
        weights = normal(rows, top_k, dtype=torch.float32, seed=3)
        places = Routing(experts, weights).sort(9).places
        combined = native.combine(results, weights, places)
        with case(rows, top_k, size):
            assert_same_bits(combined, routing.combine(results, weights, places))
        for row in range(0, rows, 7):
            one = slice(row, row + 1)
            assert_same_bits(native.combine(results, weights[one], places[one]), combined[one])
