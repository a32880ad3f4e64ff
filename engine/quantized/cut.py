"""A rank's part of a quantized matrix: rows anywhere; columns at borders of groups, or of parts of them.

A group of 128 columns is two of 64 with the same scale, so a border inside a group costs the matrix some scales and
changes no weight. Groups of columns that lie apart (act-order) are cut as they are stored: the rank has whole groups,
or parts, and takes its columns out of the whole input. GGUF's K types are cut between their blocks of 256.
"""

from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from engine.parallel.shard import Cut
from kernels.grouped import SUPER_BLOCK, GroupedMatrix, is_group_size

_PARTS = (128, 64, 32)
"""Sizes of the groups that larger ones are made of, if they can't stay."""


def cut_matrix(whole: GroupedMatrix, cut: Cut, name: str) -> GroupedMatrix:
    """What `cut` says of the matrix of the module `name`. Raises ValueError for columns that can't be cut there."""
    if not cut.ranges:
        return whole
    if cut.dim == 0:
        offsets = None if whole.offsets is None else cut.of(whole.offsets)
        levels = None if whole.levels is None else whole.levels.each(cut.of)
        numbers, scales = cut.of(whole.numbers), cut.of(whole.scales)
        return replace(whole, numbers=numbers, scales=scales, offsets=offsets, levels=levels)
    (part,) = cut.ranges
    return _columns(whole, part, name)


def _columns(whole: GroupedMatrix, part: range, name: str) -> GroupedMatrix:
    num_columns = whole.shape[1]
    if whole.order is not None and ".experts." in name:
        raise ValueError(
            f"its groups of {whole.group_size} are of columns that lie apart (act-order): experts with such can't be "
            f"shared out by {num_columns // len(part)} ranks"
        )
    levels = None
    if whole.levels is not None:
        if part.start % SUPER_BLOCK or part.stop % SUPER_BLOCK:
            raise ValueError(
                f"its {num_columns} columns in blocks of {SUPER_BLOCK} can't be shared out by "
                f"{num_columns // len(part)} ranks: one would have columns {part.start} to {part.stop - 1}"
            )
        size, levels = whole.group_size, whole.levels.columns(part)
    elif whole.group_size >= num_columns:
        size = len(part)
    else:
        size = _size(whole.group_size, part, num_columns)
    numbers = whole.numbers[:, part.start : part.stop].contiguous()
    order = None if whole.order is None else whole.order[part.start : part.stop].contiguous()
    return replace(
        whole,
        numbers=numbers,
        scales=_groups(whole.scales, whole, part, size),
        offsets=None if whole.offsets is None else _groups(whole.offsets, whole, part, size),
        group_size=size,
        order=order,
        num_inputs=None if order is None else num_columns,
        levels=levels,
    )


def _size(group_size: int, part: range, num_columns: int) -> int:
    """Of the largest groups that have borders where the part begins and ends."""
    common = gcd(group_size, part.start, 0 if part.stop == num_columns else part.stop)
    for size in (common, *_PARTS):
        if common % size == 0 and is_group_size(size):
            return size
    raise ValueError(
        f"its {num_columns} columns in groups of {group_size} can't be shared out by {num_columns // len(part)} ranks: "
        f"one would have columns {part.start} to {part.stop - 1}, and groups are cut at multiples of {_PARTS[-1]} only"
    )


def _groups(values: Tensor, whole: GroupedMatrix, part: range, size: int) -> Tensor:
    """float32 [N, groups of the whole] -> [N, those of the part]."""
    if whole.group_size >= whole.shape[1]:
        return values
    fine = torch.repeat_interleave(values, whole.group_size // size, dim=1)
    return fine[:, part.start // size : -(-part.stop // size)].contiguous()
