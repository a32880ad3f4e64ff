"""Products with weights in tile order: one, or many together."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.cpu import packed
from kernels.cpu.arguments import address, code
from kernels.cpu.packed import PackedWeight
from kernels.cpu.packed_groups import NUMBERS, PackedGroups
from kernels.cpu.packed_parts import PackedParts
from kernels.cpu.spaced_rows import spaced_rows
from kernels.products import Product

NativeWeight = PackedWeight | PackedGroups | PackedParts


def product(
    ops: Any,
    x: Tensor,
    weight: NativeWeight,
    residual: Tensor | None,
    activation: int,
    out_type: torch.dtype,
    *,
    w8a8: bool = False,
    questions: int = 0,
) -> Tensor:
    """act(x Wᵀ + b) + residual. x [M, K], residual [M, N] -> [M, N] of `out_type`.

    `w8a8`: x goes in int8 too where the weight is; `questions`: the address of what is asked about the result.
    Raises ValueError for shapes that don't fit.
    """
    if activation:
        out = spaced_rows(x.shape[0], weight.num_out, out_type)
    else:
        out = torch.empty(x.shape[0], weight.num_out, dtype=out_type)
    if isinstance(weight, PackedParts):
        for part, columns in weight.columns():
            of_part = None if residual is None else residual[:, columns]
            _product_into(ops, out[:, columns], x, part, of_part, activation, w8a8=w8a8)
    else:
        _product_into(ops, out, x, weight, residual, activation, w8a8=w8a8, questions=questions)
    return out


def _product_into(
    ops: Any,
    out: Tensor,
    x: Tensor,
    weight: PackedWeight | PackedGroups,
    residual: Tensor | None,
    activation: int,
    *,
    w8a8: bool,
    questions: int = 0,
) -> None:
    if isinstance(weight, PackedGroups) and weight.order is not None:
        x = columns_of(ops, x, weight.order)
    if x.dtype != weight.dtype or x.shape[1] != weight.num_in or weight.gated != bool(activation):
        raise ValueError(
            f"{x.dtype} rows of {x.shape[1]} don't fit a {'gated ' if weight.gated else ''}weight of "
            f"{weight.dtype} [{weight.num_out}, {weight.num_in}]"
        )
    if not len(out):
        return
    rows = x if x.stride(1) == 1 else x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    arguments = (
        *(address(weight.bias), address(residual), 0 if residual is None else residual.stride(0)),
        *(out.data_ptr(), out.stride(0), x.shape[0], weight.num_out, weight.num_in, activation, out.dtype != x.dtype),
    )
    data = (rows.data_ptr(), rows.stride(0), weight.data.data_ptr())
    if isinstance(weight, PackedGroups):
        groups = (weight.scale_form, weight.scales.data_ptr(), address(weight.offsets), weight.group_size)
        ops.linear_grouped(code(x), NUMBERS[weight.kind], *data, *groups, *arguments, questions)
    elif weight.scales is None:
        ops.linear(code(x), *data, *arguments, questions)
    else:
        ops.linear_int8(code(x), *data, weight.scales.data_ptr(), *arguments, w8a8, questions)


def columns_of(ops: Any, x: Tensor, order: Tensor) -> Tensor:
    """x's columns in another order, or some of them. x [M, K], order int64 [N] of numbers below K -> [M, N]."""
    rows = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape[0], order.shape[0], dtype=x.dtype)
    ops.columns(code(x), rows.data_ptr(), rows.stride(0), order.data_ptr(), out.data_ptr(), *out.shape)
    return out


def products_together(ops: Any, products: Sequence[Product], activation: int) -> None:
    """Each product into its place, all in one call, to the bits of a call of its own each; if they `go_together`."""
    table = [
        (
            *(each.x.data_ptr(), each.x.stride(0), each.weight.data.data_ptr(), address(each.weight.bias)),
            *(each.out.data_ptr(), each.out.stride(0), *each.out.shape, each.weight.num_in),
        )
        for each in products
        if len(each.x)
    ]
    if table:
        ops.linear_each(code(products[0].x), table, activation)


def go_together(products: Sequence[Product], *, gated: bool) -> bool:
    """Whether all weights are plain ones of one dtype, and all rows whole tiles deep: nothing has to be padded."""
    dtypes = {each.x.dtype for each in products}
    return len(dtypes) == 1 and all(
        isinstance(each.weight, PackedWeight)
        and each.weight.scales is None
        and each.weight.gated == gated
        and each.weight.dtype in dtypes
        and each.out.dtype in dtypes
        and each.x.shape[1] == each.weight.num_in
        and each.out.shape == (len(each.x), each.weight.num_out)
        and each.x.stride(1) == each.out.stride(1) == 1
        and not each.weight.num_in * each.x.element_size() % packed.DEPTH_BYTES
        for each in products
    )
