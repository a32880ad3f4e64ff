"""Weights of 4 or 8 bit numbers with a scale, and maybe an offset, for each group of columns: what checkpoints hold.

    W[n, k] = numbers[n, k] · scales[n, k // group_size] + offsets[n, k // group_size]

Plain torch: the form that every stored format is read into without loss, and the oracle of the native kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

Numbers = Literal["int4", "int8", "fp8"]

GROUP_SIZES = "32, 64 or a multiple of 128"
"""What kernels compute with, beside one group for the whole row."""


def is_group_size(size: int) -> bool:
    """Whether it is among GROUP_SIZES."""
    return size in (32, 64) or (size > 0 and size % 128 == 0)


@dataclass(frozen=True, slots=True, eq=False)
class GroupedMatrix:
    """W [N, K] as stored. Groups are of neighbours among the columns as `order` puts them.

    `numbers` are int8 [N, K] (-8 … 7 for "int4") or float8_e4m3fn without NaN, `scales` and `offsets` float32 [N, G],
    G = ceil(K / group_size). `order`: int64 [K], the column of W that each stored one is, or None for the same. With
    `num_inputs` W has so many columns, of which these are some (the others are zero here).
    Raises ValueError for parts that don't fit together.
    """

    kind: Numbers
    numbers: Tensor
    scales: Tensor
    group_size: int
    offsets: Tensor | None = None
    order: Tensor | None = None
    num_inputs: int | None = None

    def __post_init__(self) -> None:
        rows, columns = self.numbers.shape
        if not (is_group_size(self.group_size) or self.group_size >= columns):
            raise ValueError(f"groups of {self.group_size} columns are not supported; supported are {GROUP_SIZES}")
        groups = -(-columns // self.group_size)
        for name, values in (("scales", self.scales), ("offsets", self.offsets)):
            if values is None:
                continue
            if values.shape != (rows, groups):
                raise ValueError(f"{name} are {list(values.shape)}; {rows} rows of {groups} groups need one for each")
            if not bool(torch.isfinite(values).all()):
                row = int((~torch.isfinite(values)).nonzero()[0, 0])
                raise ValueError(f"row {row} of {list(self.numbers.shape)} has {name} with an infinity or a NaN")
        if self.kind == "fp8" and bool((self.numbers.view(torch.uint8) & 0x7F == 0x7F).any()):
            row = int((self.numbers.view(torch.uint8) & 0x7F == 0x7F).nonzero()[0, 0])
            raise ValueError(f"row {row} of {list(self.numbers.shape)} has a NaN")

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def dequantized(self) -> Tensor:
        """float32 [N, K or num_inputs], its columns in W's order; product and sum are rounded each."""
        columns = self.numbers.shape[1]
        weight = self.numbers.float() * self._by_column(self.scales, columns)
        if self.offsets is not None:
            weight += self._by_column(self.offsets, columns)
        if self.order is None:
            return weight
        whole = weight.new_zeros(weight.shape[0], self.num_inputs or columns)
        return whole.index_copy_(1, self.order, weight)

    def split(self, sizes: Sequence[int]) -> list["GroupedMatrix"]:
        """So many rows each, one below the other, as torch's `split`."""
        bounds = [0, *accumulate(sizes)]
        return [self._rows(slice(start, end)) for start, end in pairwise(bounds)]

    def _rows(self, rows: slice) -> "GroupedMatrix":
        offsets = None if self.offsets is None else self.offsets[rows]
        return replace(self, numbers=self.numbers[rows], scales=self.scales[rows], offsets=offsets)

    def _by_column(self, values: Tensor, columns: int) -> Tensor:
        return values.repeat_interleave(min(self.group_size, columns), dim=1)[:, :columns]
