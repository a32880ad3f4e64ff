"""Grouped weights (kernels/grouped.py) in the tile order of `packed.py`: a word is 8 int4, 4 int8 or 4 fp8 of a row.

Numbers of 5 and 6 bits have for each 32 columns 4 words of their low 4 bits and one or two of the others; a block is
128 columns as with 4 bits, so 20 or 24 words deep (src/ops/fixed.h). scales are [panels][groups][32 rows] of float16,
if that holds them to the bit, or float32; or those of `KScales` as bytes (packed_scales.py). offsets are float32.
Groups go on over the padding, with zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.packed import PANEL_ROWS, STRIP_ROWS, by_row
from kernels.cpu.packed_scales import by_panel, form_of, k_scale_bytes, narrowed, scale_bytes
from kernels.grouped import GroupedMatrix, KScales, Numbers

LAYOUT = "groups-2"
"""Names the order and the forms of scales; with `packed.LAYOUT` part of the key of whatever keeps packed weights."""

NUMBERS: dict[Numbers, int] = {"int4": 0, "int8": 1, "fp8": 2, "uint4": 3, "uint5": 4, "int5": 5, "int6": 6}
_BITS: dict[Numbers, int] = {"int4": 4, "int8": 8, "fp8": 8, "uint4": 4, "uint5": 5, "int5": 5, "int6": 6}
_STORED_PLUS: dict[Numbers, int] = {"uint4": -8, "int5": 16, "int6": 32}
_UNIT = 32
"""Columns whose further bits share words."""


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
    def scale_form(self) -> int:
        """How the scales are stored, as the native kernels count the ways."""
        return form_of(self.scales.dtype, self.kind)

    @property
    def nbytes(self) -> int:
        parts = (self.data, self.scales, self.offsets, self.order, self.bias)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class PackedSizes:
    """Bytes of the parts of a weight in groups, each but `data` and `scales` if it is there."""

    data: int
    scales: int
    offsets: int
    bias: int
    order: int


def packed_sizes(kind: Numbers, num_out: int, num_in: int, group_size: int, form: int, *, gated: bool) -> PackedSizes:
    """Of a weight as `pack_groups` makes it, its scales in that form."""
    rows = _round_up(2 * _round_up(num_out, STRIP_ROWS) if gated else num_out, PANEL_ROWS)
    depth = _round_up(num_in, _block(kind))
    groups = -(-depth // group_size)
    scales = rows // PANEL_ROWS * scale_bytes(form, groups, depth)
    return PackedSizes(rows * depth * _BITS[kind] // 8, scales, 4 * rows * groups, 4 * rows, 8 * num_in)


def pack_groups(
    module: Any, weights: Sequence[GroupedMatrix], dtype: torch.dtype, biases: Sequence[Tensor] = (), *, gated: bool
) -> PackedGroups:
    """Pack weights one below the other, or with `gated` the two of a gated MLP. Raises ValueError.

    They must be alike (`GroupedMatrix.is_like`).
    """
    first = weights[0]
    kind, columns = first.kind, first.shape[1]
    for weight in weights[1:]:
        if not weight.is_like(first):
            raise ValueError(
                "gate and up must have one kind of numbers, group size and number of columns, and these in one order"
            )
    depth = _round_up(columns, _block(kind))
    group_size = min(first.group_size, depth) if first.group_size < columns else depth
    has_offsets = first.levels is None and any(weight.offsets is not None for weight in weights)
    parts = [
        _Part(
            _bytes(weight),
            _pad_groups(weight.scales, depth, group_size),
            _pad_groups(_offsets(weight), depth, group_size) if has_offsets else None,
            weight.levels,
        )
        for weight in weights
    ]
    if not gated and any(weight.shape[0] % STRIP_ROWS for weight in weights[:-1]):
        parts = [_joined(parts)]
        biases = [torch.cat(list(biases))] if biases else ()
    num_out = first.shape[0] if gated else sum(weight.shape[0] for weight in weights)
    block_words = _block(kind) * _BITS[kind] // 32
    sizes = packed_sizes(kind, num_out, columns, group_size, 0, gated=gated)
    data = torch.zeros(sizes.data, dtype=torch.uint8)
    strip = 0
    for index, part in enumerate(parts):
        rows = part.rows
        module.pack(
            *(rows.data_ptr(), rows.stride(0), rows.shape[1], rows.shape[0], data.data_ptr(), depth // _block(kind)),
            *(index if gated else strip, 2 if gated else 1, block_words),
        )
        strip += -(-rows.shape[0] // STRIP_ROWS)
    levels = [part.levels for part in parts if part.levels is not None]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    scales = k_scale_bytes(levels, gated) if levels else narrowed(by_panel([part.scales for part in parts], gated))
    return PackedGroups(
        data, num_out, columns, dtype, kind, group_size, scales,
        by_panel(offsets, gated).flatten() if offsets else None, first.order, gated,
        by_row(biases, gated) if biases else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Part:
    """rows uint8 [N, bytes]; scales and offsets [N, groups]."""

    rows: Tensor
    scales: Tensor
    offsets: Tensor | None
    levels: KScales | None


def _joined(parts: Sequence[_Part]) -> _Part:
    offsets = [part.offsets for part in parts if part.offsets is not None]
    levels = [part.levels for part in parts if part.levels is not None]
    return _Part(
        torch.cat([part.rows for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(offsets) if offsets else None,
        KScales.joined(levels) if levels else None,
    )


def _bytes(weight: GroupedMatrix) -> Tensor:
    """uint8 [N, bytes of a row], the first of two int4 in the lower half of a byte; of 5 and 6 bits whole blocks."""
    kind = weight.kind
    if _BITS[kind] == 8:
        return weight.numbers.view(torch.uint8).contiguous()
    codes = (weight.numbers + _STORED_PLUS.get(kind, 0)).view(torch.uint8)
    if _BITS[kind] == 4:
        return _nibbles(F.pad(codes, (0, codes.shape[1] % 2)))
    codes = F.pad(codes, (0, -codes.shape[1] % _block(kind))).view(len(codes), -1, _UNIT)
    return torch.cat((_nibbles(codes), _further_bits(codes >> 4, _BITS[kind] - 4)), dim=2).flatten(1)


def _nibbles(codes: Tensor) -> Tensor:
    return (codes[..., 0::2] & 15) | (codes[..., 1::2] << 4)


def _further_bits(high: Tensor, bits: int) -> Tensor:
    """uint8 [N, units, 32], so many bits each -> [N, units, 4 · bits].

    Column k is in half k % 8 / 4 of a word, in field k / 8 · 4 + k % 4 counted over the halves of all words.
    """
    k = torch.arange(_UNIT)
    field, per_half = k // 8 * 4 + k % 4, 16 // bits
    shifts = (field % per_half * bits + k % 8 // 4 * 16).int()
    shifted = high.int() << shifts
    words = [shifted[..., field // per_half == word].sum(2, dtype=torch.int32) for word in range(bits)]
    return torch.stack(words, dim=2).view(torch.uint8)


def _block(kind: Numbers) -> int:
    """Columns of a block."""
    return 64 if _BITS[kind] == 8 else 128


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _offsets(weight: GroupedMatrix) -> Tensor:
    return torch.zeros_like(weight.scales) if weight.offsets is None else weight.offsets


def _pad_groups(values: Tensor, depth: int, group_size: int) -> Tensor:
    return F.pad(values, (0, -(-depth // group_size) - values.shape[1]))
