"""Rows of packed weights, widened to their dtype."""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu.arguments import address
from kernels.cpu.packed import DTYPES
from kernels.cpu.packed_groups import NUMBERS, PackedGroups
from kernels.cpu.packed_parts import PackedParts
from kernels.cpu.products import NativeWeight


def embed(ops: Any, ids: Tensor, weight: Tensor | NativeWeight, scale: float | None) -> Tensor:
    """Rows of `weight`, times `scale` rounded to its dtype. ids [T] -> [T, H].

    Raises IndexError, and ValueError for a weight that can't be one.
    """
    if isinstance(weight, Tensor):
        return reference.embedding(ids, weight, scale)
    if isinstance(weight, PackedParts):
        raise ValueError("a weight of several parts is no embedding")
    ids = ids.contiguous()
    out = torch.empty(ids.shape[0], weight.num_in, dtype=weight.dtype)
    size = (ids.shape[0], weight.num_in, 1.0 if scale is None else _rounded(scale, weight.dtype), weight.num_out)
    if isinstance(weight, PackedGroups):
        if weight.order is not None:
            raise ValueError("a weight whose columns are in another order is no embedding")
        groups = (weight.scale_form, weight.scales.data_ptr(), address(weight.offsets), weight.group_size)
        ops.embedding_grouped(
            *(DTYPES[weight.dtype], NUMBERS[weight.kind], ids.data_ptr(), weight.data.data_ptr()),
            *(*groups, out.data_ptr(), *size),
        )
        return out
    ops.embedding(
        *(DTYPES[weight.dtype], ids.data_ptr(), weight.data.data_ptr(), address(weight.scales), out.data_ptr()),
        *size,
    )
    return out


@cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    """To the nearest of `dtype`, ties to even; without torch, which may not compute while a step is recorded."""
    bits = int(np.float32(scale).view(np.uint32))
    if dtype == torch.bfloat16:
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(np.uint32(bits).view(np.float32))
