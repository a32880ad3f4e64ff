"""Scales of grouped weights as the native kernels read them, a panel of 32 rows after the other (src/args.h).

form 0, 1   float32 or float16 [panels][groups][32]
form 2      of `KScales` with mins: for each panel and 256 columns float16 upper, upper_min [32], uint8 lower,
            lower_min [8][32]
form 3      of `KScales` without: float16 upper [32], int8 lower [16][32]
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.packed import PANEL_ROWS, by_row
from kernels.grouped import SUPER_BLOCK, KScales, Numbers

_DTYPES = {0: torch.float32, 1: torch.float16}
_K_MIN, _K = 2, 3
_BLOCK_BYTES = {_K_MIN: 640, _K: 576}


def form_of(dtype: torch.dtype, kind: Numbers) -> int:
    """Of scales stored as `dtype`; uint8 are the bytes of `KScales`."""
    if dtype == torch.uint8:
        return _K if kind == "int6" else _K_MIN
    return 1 if dtype == torch.float16 else 0


def scale_bytes(form: int, num_groups: int, depth: int) -> int:
    """Of a panel."""
    if form in _BLOCK_BYTES:
        return depth // SUPER_BLOCK * _BLOCK_BYTES[form]
    return num_groups * PANEL_ROWS * _DTYPES[form].itemsize


def scales_from_bytes(form: int, stored: Tensor) -> Tensor:
    """uint8 -> the scales that `form_of` has that form for."""
    return stored if form in _BLOCK_BYTES else stored.view(_DTYPES[form])


def is_form(form: int) -> bool:
    """Whether it is one."""
    return form in _DTYPES or form in _BLOCK_BYTES


def narrowed(scales: Tensor) -> Tensor:
    """Flat, as float16 if nothing is lost by it: a step reads less."""
    half = scales.flatten().half()
    return half if torch.equal(half.float(), scales.flatten()) else scales.flatten()


def by_panel(parts: Sequence[Tensor], gated: bool) -> Tensor:
    """[N, groups] each -> float32 [panels, groups, 32], in the order of the packed rows."""
    columns = [by_row([part[:, group] for part in parts], gated) for group in range(parts[0].shape[1])]
    return torch.stack([column.view(-1, PANEL_ROWS) for column in columns], dim=1)


def k_scale_bytes(levels: Sequence[KScales], gated: bool) -> Tensor:
    """uint8, flat: form 2 or 3."""
    num_blocks = levels[0].upper.shape[1]

    def part(tensors: Sequence[Tensor | None]) -> list[Tensor]:
        there = [tensor for tensor in tensors if tensor is not None]
        if not there:
            return []
        ordered = by_panel(there, gated).to(there[0].dtype)
        return [ordered.view(torch.uint8).reshape(ordered.shape[0] * num_blocks, -1)]

    parts = part([each.upper for each in levels]) + part([each.upper_min for each in levels])
    parts += part([each.lower for each in levels]) + part([each.lower_min for each in levels])
    return torch.cat(parts, dim=1).flatten()
