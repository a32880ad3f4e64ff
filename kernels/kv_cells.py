"""A KV cache in one byte for each value: its two formats, and one layer's cells as a kernel set sees them.

    cell        block_size rows of head_dim bytes, zeros up to a multiple of 4, block_size float32 scales
    int8        x ≈ q · s, s = max |x| / 127; q = x · (127 / max |x|) rounded to the nearest, halves to even
    fp8_e4m3    the same with 448 for 127 and q rounded to float8 e4m3; what is below 2^-6 in size becomes 0

The scale is of one token's key (or value) of one kv head, max |x| over its head_dim: the bytes depend on nothing else.
Int8's keys are rotated before, since a few of their dimensions are far larger than the rest and make a scale coarse
(e4m3's steps are relative to each number, and a rotation only spreads the errors of large ones):

    k' = H k, q' = H q / n, so that q' k' = q k     H: Hadamard's matrix of ±1, n the largest power of two in head_dim

All of it is float32 operations that every kernel set repeats exactly, so that each stores the same bytes of a row.
e4m3's subnormals are left out because bfloat16's dot products and AMX's tiles take such numbers for 0.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.paged import PagedBatch

KvFormat = Literal["int8", "fp8_e4m3"]
LIMITS: dict[KvFormat, float] = {"int8": 127.0, "fp8_e4m3": 448.0}
SCALE_BYTES = 4
_LEAST_FP8 = 2.0**-6


def value_bytes(block_size: int, head_dim: int) -> int:
    """Bytes of a cell before its scales."""
    return -(-block_size * head_dim // SCALE_BYTES) * SCALE_BYTES


def cell_bytes(block_size: int, head_dim: int) -> int:
    return value_bytes(block_size, head_dim) + SCALE_BYTES * block_size


@dataclass(frozen=True, slots=True)
class QuantizedCells:
    """One layer's keys or values: `values` [num_blocks, Hkv, block_size, D], float32 `scales` without the D.

    Values are int8, or uint8 that hold e4m3; int8 keys are `rotated`. `view` makes them of a pool's memory, in which
    the scales of a cell follow its values.
    """

    kind: KvFormat
    values: Tensor
    scales: Tensor
    rotated: bool

    @staticmethod
    def view(kind: KvFormat, cells: Tensor, block_size: int, head_dim: int, *, keys: bool) -> "QuantizedCells":
        """Of uint8 [num_blocks, Hkv, cell_bytes]; `keys`, or else values."""
        numbers = cells.view(torch.int8) if kind == "int8" else cells
        values = numbers[:, :, : block_size * head_dim].view(*cells.shape[:2], block_size, head_dim)
        scales = cells[:, :, value_bytes(block_size, head_dim) :].view(torch.float32)
        return QuantizedCells(kind, values, scales, keys and kind == "int8")

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def load(self, block_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """What stands in these blocks, value times scale, still rotated. -> [blocks, Hkv, block_size, D] of `dtype`."""
        values = self.values.index_select(0, block_ids)
        numbers = values if self.kind == "int8" else values.view(torch.float8_e4m3fn)
        return numbers.to(dtype) * self.scales.index_select(0, block_ids).to(dtype)[..., None]

    def store(self, rows: Tensor, blocks: Tensor, offsets: Tensor) -> None:
        """rows [T, Hkv, D] into slot `offsets[t]` of `blocks[t]`."""
        values, scales = quantize(self.kind, rotate(rows.float()) if self.rotated else rows)
        self.values[blocks, :, offsets] = values
        self.scales[blocks, :, offsets] = scales


Cells = Tensor | QuantizedCells
"""One layer's keys or values in the cache: in the compute dtype, or quantized."""


def quantize(kind: KvFormat, rows: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] -> (int8 or uint8 [..., D], float32 scales [...]).

    A row that isn't finite gets such a scale, so that it spoils what it would have spoilt.
    """
    wide, limit = rows.float(), LIMITS[kind]
    largest = wide.abs().amax(-1)
    # Not limit / largest, which torch computes in two roundings.
    inverse = torch.where(largest == 0, 0.0, torch.full_like(largest, limit).div_(largest))
    scaled = wide * inverse[..., None]
    scaled = torch.where(torch.isnan(scaled), limit, scaled.clamp(-limit, limit))
    if kind == "int8":
        return torch.round(scaled).to(torch.int8), largest / limit
    numbers = torch.where(scaled.abs() < _LEAST_FP8, 0.0, scaled).to(torch.float8_e4m3fn)
    return numbers.view(torch.uint8), largest / limit


def rotate(x: Tensor) -> Tensor:
    """H x of x [..., D] in x's dtype, by sums and differences at distances 1, 2, 4, … in this order.

    Where D isn't a power of two, each piece of the largest power of two that divides it is rotated alone.
    """
    size, distance = x.shape[-1], 1
    while size % (2 * distance) == 0:
        first, second = x.reshape(*x.shape[:-1], -1, 2, distance).unbind(-2)
        x = torch.stack((first + second, first - second), -2).reshape(x.shape)
        distance *= 2
    return x


def rotate_queries(q: Tensor, keys: Cells, dtype: torch.dtype) -> Tensor:
    """Queries [..., D] as `keys` want them, in `dtype`."""
    wide, size = q.to(dtype), q.shape[-1]
    if not isinstance(keys, QuantizedCells) or not keys.rotated:
        return wide
    return rotate(wide) / (size & -size)


def load_blocks(cells: Cells, block_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The cells of these blocks in `dtype`: [blocks, Hkv, block_size, D].

    `index_select` copies whole blocks; indexing goes element by element (66 against 713 us for 256 blocks of 8 KiB).
    """
    if isinstance(cells, QuantizedCells):
        return cells.load(block_ids, dtype)
    return cells.index_select(0, block_ids).to(dtype)


def store_rows(cells: Cells, rows: Tensor, batch: PagedBatch) -> None:
    """The step's keys or values [T, Hkv, D] into their slots."""
    if isinstance(cells, QuantizedCells):
        cells.store(rows, batch.slot_blocks, batch.slot_offsets)
    else:
        cells[batch.slot_blocks, :, batch.slot_offsets] = rows
