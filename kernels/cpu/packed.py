"""Weights in the tile order the native kernels read: one flat buffer per weight, fit for a file that processes share.

    data    [panels][depth blocks][2 strips][16 words][16 rows] of 4-byte words; 32 rows of W are a panel, 16 a strip,
            and a word is 1 float32, 2 bfloat16 or 4 int8 next to each other in a row. Rows and depth are padded with
            zeros.
    gated   gate and up projection in one: strips alternate between them, so that a panel holds 16 rows of each
    int8    the numbers of `kernels.int8`, with a scale for each packed row

The order is the same for all instruction sets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.int8 import MAX_DEPTH, quantize_weight

LAYOUT = "tiles-1"
"""Names the order; part of the key of whatever keeps packed weights."""

PANEL_ROWS = 32
STRIP_ROWS = 16
DEPTH_BYTES = 64
TILE_WORDS = 16
_BLOCK_BYTES = PANEL_ROWS * DEPTH_BYTES

DTYPES = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """W [num_out, num_in], or gate and up [num_out, num_in] each, for input of `dtype`.

    `bias` and `scales` (of int8 data; None: the data is of `dtype`) are float32, in the order of the packed rows.
    """

    data: Tensor
    num_out: int
    num_in: int
    dtype: torch.dtype
    gated: bool = False
    bias: Tensor | None = None
    scales: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.data, self.bias, self.scales) if part is not None)


def packed_bytes(num_out: int, num_in: int, dtype: torch.dtype, *, gated: bool = False) -> int:
    """The size of a packed weight's data; `dtype` is what is stored."""
    rows = 2 * _round_up(num_out, STRIP_ROWS) if gated else num_out
    return -(-rows // PANEL_ROWS) * -(-num_in * dtype.itemsize // DEPTH_BYTES) * _BLOCK_BYTES


def pack(
    module: Any,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] = (),
    *,
    gated: bool = False,
    int8: bool = False,
    out: Tensor | None = None,
) -> PackedWeight:
    """Pack weights [rows_i, num_in] one below the other (q, k and v), or with `gated` the two of a gated MLP.

    `int8`: quantized on the way. `out`: uint8 [packed_bytes(...)], all zeros, 64-byte aligned; else it is allocated.
    Raises ValueError.
    """
    first = weights[0]
    num_in, dtype = first.shape[1], first.dtype
    if dtype not in DTYPES:
        raise ValueError(f"weights of {dtype} can't be packed; {', '.join(map(str, DTYPES))} can")
    if any(weight.shape[1] != num_in or weight.dtype != dtype for weight in weights):
        raise ValueError("weights packed together must have one dtype and one number of columns")
    if gated and (len(weights) != 2 or weights[0].shape != weights[1].shape):
        raise ValueError("a gated weight is made of a gate and an up projection of one shape")
    if biases and [bias.shape[0] for bias in biases] != [weight.shape[0] for weight in weights]:
        raise ValueError("each weight needs a bias of its number of rows, or none does")
    if int8 and num_in > MAX_DEPTH:
        raise ValueError(f"a weight of {num_in} columns has no int8 form; at most {MAX_DEPTH} are supported")
    if not gated and any(weight.shape[0] % STRIP_ROWS for weight in weights[:-1]):
        weights = [torch.cat(list(weights))]
        biases = [torch.cat(list(biases))] if biases else ()
    num_out = first.shape[0] if gated else sum(weight.shape[0] for weight in weights)
    stored = torch.int8 if int8 else dtype
    size = packed_bytes(num_out, num_in, stored, gated=gated)
    data = torch.zeros(size, dtype=torch.uint8) if out is None else out
    if data.numel() != size or data.dtype != torch.uint8 or data.data_ptr() % 64:
        raise ValueError(f"a packed weight needs {size} bytes at a multiple of 64, not {data.numel()} of {data.dtype}")
    strip = 0
    scales = []
    for index, weight in enumerate(weights):
        if int8:
            weight, row_scales = quantize_weight(weight)
            scales.append(row_scales)
        rows = weight if weight.stride(1) == 1 else weight.contiguous()
        module.pack(
            rows.data_ptr(),
            rows.stride(0) * stored.itemsize,
            num_in * stored.itemsize,
            rows.shape[0],
            data.data_ptr(),
            -(-num_in * stored.itemsize // DEPTH_BYTES),
            index if gated else strip,
            2 if gated else 1,
            TILE_WORDS,
        )
        strip += -(-rows.shape[0] // STRIP_ROWS)
    bias = by_row(biases, gated) if biases else None
    return PackedWeight(data, num_out, num_in, dtype, gated, bias, by_row(scales, gated) if int8 else None)


def by_row(values: Sequence[Tensor], gated: bool) -> Tensor:
    """Biases or scales [rows] in the order of the packed rows, padded to whole panels."""
    if gated:
        length = _round_up(values[0].shape[0], STRIP_ROWS)
        strips = torch.zeros(length // STRIP_ROWS, 2, STRIP_ROWS)
        for index, value in enumerate(values):
            padded = torch.nn.functional.pad(value.float(), (0, length - value.shape[0]))
            strips[:, index] = padded.view(-1, STRIP_ROWS)
        return strips.flatten()
    joined = torch.cat([value.float() for value in values])
    return torch.nn.functional.pad(joined, (0, -joined.shape[0] % PANEL_ROWS))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
