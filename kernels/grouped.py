"""Weights of 4 or 8 bit numbers with a scale, and maybe an offset, for each group of columns: what checkpoints hold.

    W[n, k] = numbers[n, k] · scales[n, k // group_size] + offsets[n, k // group_size]

llama.cpp's K types have scales and offsets of two levels, which are products of small numbers (`KScales`).
`in_fixed_point` is what native kernels make of their input. Plain torch: the form that every stored format is read into
without loss, and the oracle of the native kernels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

Numbers = Literal["int4", "int8", "fp8", "uint4", "uint5", "int5", "int6"]

RANGES: dict[Numbers, tuple[int, int]] = {
    "int4": (-8, 7), "int8": (-128, 127), "uint4": (0, 15), "uint5": (0, 31), "int5": (-16, 15), "int6": (-32, 31),
}  # fmt: skip
"""The numbers of each kind, all in int8 here; fp8 are floats."""

GROUP_SIZES = "32, 64 or a multiple of 128"
"""What kernels compute with, beside one group for the whole row, and 16 of `KScales`."""

SUPER_BLOCK = 256
"""Columns of the upper level of `KScales`."""


def is_group_size(size: int) -> bool:
    """Whether it is among GROUP_SIZES."""
    return size in (32, 64) or (size > 0 and size % 128 == 0)


@dataclass(frozen=True, slots=True, eq=False)
class KScales:
    """scale = upper · lower, offset = -upper_min · lower_min; exact in float32.

    `upper` and `upper_min` are float16 [N, K / 256]; `lower` int8 [N, G] of 16 columns, or with mins uint8 of 32, as
    `lower_min` is. The mins are there both or neither.
    """

    upper: Tensor
    lower: Tensor
    upper_min: Tensor | None = None
    lower_min: Tensor | None = None

    @property
    def group_size(self) -> int:
        return 16 if self.upper_min is None else 32

    def scales(self) -> Tensor:
        """float32 [N, G]."""
        return _products(self.upper, self.lower)

    def offsets(self) -> Tensor | None:
        """float32 [N, G]."""
        if self.upper_min is None or self.lower_min is None:
            return None
        return -_products(self.upper_min, self.lower_min)

    @staticmethod
    def joined(parts: Sequence["KScales"]) -> "KScales":
        """One below the other."""
        mins = [(part.upper_min, part.lower_min) for part in parts]
        upper_min = [upper for upper, _ in mins if upper is not None]
        lower_min = [lower for _, lower in mins if lower is not None]
        return KScales(
            torch.cat([part.upper for part in parts]),
            torch.cat([part.lower for part in parts]),
            torch.cat(upper_min) if upper_min else None,
            torch.cat(lower_min) if lower_min else None,
        )

    def rows(self, rows: slice) -> "KScales":
        return self.each(lambda part: part[rows])

    def columns(self, part: range) -> "KScales":
        """Those of these columns of W, which are whole blocks of SUPER_BLOCK."""

        def some(values: Tensor) -> Tensor:
            width = values.shape[1] // self.upper.shape[1]
            blocks = values.view(values.shape[0], -1, width)
            return blocks[:, part.start // SUPER_BLOCK : part.stop // SUPER_BLOCK].flatten(1).contiguous()

        return self.each(some)

    def each(self, change: Callable[[Tensor], Tensor]) -> "KScales":
        """With every part changed."""
        mins = (None if part is None else change(part) for part in (self.upper_min, self.lower_min))
        return KScales(change(self.upper), change(self.lower), *mins)


def _products(upper: Tensor, lower: Tensor) -> Tensor:
    per_block = lower.shape[1] // max(upper.shape[1], 1)
    return upper.float().repeat_interleave(per_block, dim=1) * lower.float()


@dataclass(frozen=True, slots=True, eq=False)
class GroupedMatrix:
    """W [N, K] as stored. Groups are of neighbours among the columns as `order` puts them.

    `numbers` are int8 [N, K] within `RANGES` or float8_e4m3fn without NaN, `scales` and `offsets` float32 [N, G],
    G = ceil(K / group_size). `order`: int64 [K], the column of W that each stored one is, or None for the same. With
    `num_inputs` W has so many columns, of which these are some (the others are zero here). `levels`: what scales and
    offsets are made of, if they have two levels. Raises ValueError for parts that don't fit together.
    """

    kind: Numbers
    numbers: Tensor
    scales: Tensor
    group_size: int
    offsets: Tensor | None = None
    order: Tensor | None = None
    num_inputs: int | None = None
    levels: KScales | None = None

    @staticmethod
    def of_levels(kind: Numbers, numbers: Tensor, levels: KScales) -> "GroupedMatrix":
        """With scales of two levels. Raises ValueError."""
        return GroupedMatrix(kind, numbers, levels.scales(), levels.group_size, levels.offsets(), levels=levels)

    def __post_init__(self) -> None:
        rows, columns = self.numbers.shape
        if self.levels is not None:
            if columns % SUPER_BLOCK:
                raise ValueError(
                    f"{columns} columns are no whole blocks of {SUPER_BLOCK}, which scales of two levels need"
                )
        elif not (is_group_size(self.group_size) or self.group_size >= columns):
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

    def is_like(self, other: "GroupedMatrix") -> bool:
        """Whether both have one kind of numbers, groups and columns in one order: they can be packed as one."""
        forms = [(each.kind, each.group_size, each.shape[1], each.levels is None) for each in (self, other)]
        same_order = self.order is other.order or (
            self.order is not None and other.order is not None and torch.equal(self.order, other.order)
        )
        return forms[0] == forms[1] and same_order

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
        levels = None if self.levels is None else self.levels.rows(rows)
        return replace(self, numbers=self.numbers[rows], scales=self.scales[rows], offsets=offsets, levels=levels)

    def _by_column(self, values: Tensor, columns: int) -> Tensor:
        return values.repeat_interleave(min(self.group_size, columns), dim=1)[:, :columns]


def in_fixed_point(x: Tensor, block: int) -> Tensor:
    """float64 [M, K]: x as 16 bit integers times one power of two for each `block` columns of a row.

    2^14 <= max |integer| < 2^15, rounded to the nearest, halves to even. Magnitudes below 2^-112 lose more.
    """
    rows, columns = x.shape
    blocks = torch.nn.functional.pad(x.double(), (0, -columns % block)).view(rows, -1, block)
    largest = blocks.abs().amax(2, keepdim=True)
    exponents = torch.frexp(largest).exponent - 15
    steps = torch.ldexp(torch.ones_like(largest), exponents.clamp(min=-126))
    return (torch.round(blocks / steps).clamp(-32768, 32767) * steps).view(rows, -1)[:, :columns]
