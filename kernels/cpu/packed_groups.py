"""Grouped weights (kernels/grouped.py) in the tile order of `packed.py`: a word is 8 int4, 4 int8 or 4 fp8 of a row.

scales and offsets are float32 [panels][groups][32 rows]; groups go on over the padding, with zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.packed import DEPTH_BYTES, PANEL_ROWS, STRIP_ROWS, by_row, packed_bytes
from kernels.grouped import GroupedMatrix, Numbers

NUMBERS: dict[Numbers, int] = {"int4": 0, "int8": 1, "fp8": 2}
_PER_BYTE: dict[Numbers, int] = {"int4": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True, slots=True, eq=False)
class PackedGroups:
    """W [num_out, num_in], or gate and up [num_out, num_in] each, for input of `dtype`.

    `order`: the column of the input, which may have more of them, that each column of the packed weight takes; None:
    its own. `group_size` is in columns; one group for a whole row covers the padding too.
    """

    data: Tensor
    num_out: int
    num_in: int
    dtype: torch.dtype
    kind: Numbers
    group_size: int
    scales: Tensor
    offsets: Tensor | None = None
    order: Tensor | None = None
    gated: bool = False
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        parts = (self.data, self.scales, self.offsets, self.order, self.bias)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class PackedSizes:
    """Bytes of the parts of a weight in groups, each but `data` if it is there."""

    data: int
    scales: int
    bias: int
    order: int


def packed_sizes(kind: Numbers, num_out: int, num_in: int, group_size: int, *, gated: bool) -> PackedSizes:
    """Of a weight as `pack_groups` makes it."""
    per_byte = _PER_BYTE[kind]
    data = packed_bytes(num_out, -(-num_in // per_byte), torch.uint8, gated=gated)
    rows = data // packed_bytes(PANEL_ROWS, -(-num_in // per_byte), torch.uint8) * PANEL_ROWS
    depth = _padded(num_in, per_byte)
    return PackedSizes(data, 4 * rows * -(-depth // group_size), 4 * rows, 8 * num_in)


def pack_groups(
    module: Any, weights: Sequence[GroupedMatrix], dtype: torch.dtype, biases: Sequence[Tensor] = (), *, gated: bool
) -> PackedGroups:
    """Pack weights one below the other, or with `gated` the two of a gated MLP. Raises ValueError.

    They must have the same kind of numbers, groups and order of columns.
    """
    first = weights[0]
    columns, per_byte = first.shape[1], _PER_BYTE[first.kind]
    for weight in weights[1:]:
        if (weight.kind, weight.group_size, weight.shape[1]) != (first.kind, first.group_size, columns):
            raise ValueError("matrices over one input must have one kind of numbers, group size and number of columns")
        if not _same(weight.order, first.order):
            raise ValueError("matrices over one input must have their columns in one order")
    depth = _padded(columns, per_byte)
    group_size = min(first.group_size, depth) if first.group_size < columns else depth
    has_offsets = any(weight.offsets is not None for weight in weights)
    strips = [
        _Part(
            _bytes(weight),
            _pad_groups(weight.scales, depth, group_size),
            _pad_groups(_offsets(weight), depth, group_size) if has_offsets else None,
        )
        for weight in weights
    ]
    if not gated and any(weight.shape[0] % STRIP_ROWS for weight in weights[:-1]):
        strips = [_joined(strips)]
        biases = [torch.cat(list(biases))] if biases else ()
    num_out = first.shape[0] if gated else sum(weight.shape[0] for weight in weights)
    sizes = packed_sizes(first.kind, num_out, columns, group_size, gated=gated)
    data = torch.zeros(sizes.data, dtype=torch.uint8)
    strip = 0
    for index, part in enumerate(strips):
        rows = part.rows
        module.pack(
            *(
                rows.data_ptr(),
                rows.stride(0),
                rows.shape[1],
                rows.shape[0],
                data.data_ptr(),
                depth // (DEPTH_BYTES * per_byte),
            ),
            *(index if gated else strip, 2 if gated else 1),
        )
        strip += -(-rows.shape[0] // STRIP_ROWS)
    offsets = [part.offsets for part in strips if part.offsets is not None]
    return PackedGroups(
        data, num_out, columns, dtype, first.kind, group_size, _by_panel([part.scales for part in strips], gated),
        _by_panel(offsets, gated) if offsets else None, first.order, gated, by_row(biases, gated) if biases else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Part:
    """rows uint8 [N, bytes]; scales and offsets [N, groups]."""

    rows: Tensor
    scales: Tensor
    offsets: Tensor | None


def _joined(parts: Sequence[_Part]) -> _Part:
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return _Part(
        torch.cat([part.rows for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(offsets) if offsets else None,
    )


def _bytes(weight: GroupedMatrix) -> Tensor:
    """uint8 [N, bytes of a row], the first of two int4 in the lower half of a byte."""
    numbers = weight.numbers.view(torch.uint8)
    if weight.kind != "int4":
        return numbers.contiguous()
    numbers = F.pad(numbers, (0, numbers.shape[1] % 2))
    return (numbers[:, 0::2] & 15) | (numbers[:, 1::2] << 4)


def _padded(columns: int, per_byte: int) -> int:
    """To whole blocks."""
    block = DEPTH_BYTES * per_byte
    return -(-columns // block) * block


def _offsets(weight: GroupedMatrix) -> Tensor:
    return torch.zeros_like(weight.scales) if weight.offsets is None else weight.offsets


def _pad_groups(values: Tensor, depth: int, group_size: int) -> Tensor:
    return F.pad(values, (0, -(-depth // group_size) - values.shape[1]))


def _by_panel(parts: Sequence[Tensor], gated: bool) -> Tensor:
    """[N, groups] each -> [panels, groups, 32] flat, in the order of the packed rows."""
    columns = [by_row([part[:, group] for part in parts], gated) for group in range(parts[0].shape[1])]
    return torch.stack([column.view(-1, PANEL_ROWS) for column in columns], dim=1).flatten()


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right or (left is not None and right is not None and torch.equal(left, right))
