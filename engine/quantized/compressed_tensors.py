"""compressed-tensors' tensors: numbers packed along the columns, or FP8 with a scale for the matrix or for each row.

pack-quantized      W[n, k] = (code[n, k] - zero[n, g]) · scale[n, g]; codes are numbers + 2^(bits - 1)
    weight_packed       int32 [N, K · bits / 32], the codes of neighbouring k in one number, lowest bits first
    weight_scale        [N, G]
    weight_zero_point   int32 [N · bits / 32, G], of neighbouring n, packed like codes; none if symmetric
    weight_g_idx        int32 [K]; with actorder "group" a group's columns lie apart
    weight_shape        [2]: N, K

float-quantized     W[n, k] = weight[n, k] · scale[n]
    weight              float8_e4m3fn [N, K]
    weight_scale        [1], [N] or [N, 1]
    input_scale         of activations; unused: here activations stay in the compute dtype
"""

from dataclasses import dataclass

import torch

from engine.quantized.stored import FLOATS, INTEGERS, StoredMatrix, column_order, num_groups, unpack, zero_offsets
from kernels.grouped import GroupedMatrix


@dataclass(frozen=True, slots=True)
class PackQuantized:
    """`group_size` -1: one group. `reordered`: weight_g_idx says which columns a group has."""

    bits: int
    group_size: int
    symmetric: bool
    reordered: bool

    marker = "weight_packed"
    suffixes = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")

    @property
    def label(self) -> str:
        name = f"w{self.bits}a16g{self.group_size}"
        return name + ("" if self.symmetric else "zp") + ("actorder" if self.reordered else "")

    def read(self, matrix: StoredMatrix, rows: int, columns: int) -> GroupedMatrix:
        """Raises ValueError."""
        per_number = 32 // self.bits
        if self.symmetric and matrix.has("weight_zero_point"):
            raise matrix.error("weight_zero_point", "is there although quantization_config says symmetric")
        if not self.reordered and matrix.has("weight_g_idx"):
            raise matrix.error("weight_g_idx", "is there although quantization_config has no actorder 'group'")
        if matrix.has("weight_shape"):
            shape = matrix.take("weight_shape", (2,), (torch.int64, torch.int32)).tolist()
            if shape != [rows, columns]:
                raise matrix.error("weight_shape", f"says {shape}; the config asks for {[rows, columns]}")
        groups = num_groups(columns, self.group_size)
        packed = matrix.take("weight_packed", (rows, -(-columns // per_number)), INTEGERS)
        scales = matrix.take("weight_scale", (rows, groups), FLOATS).float()
        order = column_order(matrix, "weight_g_idx", columns, self.group_size) if self.reordered else None
        codes = unpack(packed, self.bits).flatten(1)[:, :columns]
        offsets = None
        if not self.symmetric:
            packed_zeros = matrix.take("weight_zero_point", (-(-rows // per_number), groups), INTEGERS)
            zeros = unpack(packed_zeros.T, self.bits).flatten(1)[:, :rows].T
            offsets = zero_offsets(scales, zeros, self.bits)
        return GroupedMatrix(
            kind="int4" if self.bits == 4 else "int8",
            numbers=((codes if order is None else codes[:, order]) - (1 << (self.bits - 1))).char(),
            scales=scales,
            group_size=columns if self.group_size == -1 else self.group_size,
            offsets=offsets,
            order=order,
        )


@dataclass(frozen=True, slots=True)
class Float8:
    """`by_row`: a scale for each row, else one for the matrix."""

    by_row: bool

    marker = "weight_scale"
    suffixes = ("weight", "weight_scale", "input_scale")

    @property
    def label(self) -> str:
        return "fp8"

    def read(self, matrix: StoredMatrix, rows: int, columns: int) -> GroupedMatrix:
        """Raises ValueError."""
        numbers = matrix.take("weight", (rows, columns), (torch.float8_e4m3fn,))
        scale = matrix.take("weight_scale", matrix.shape_among("weight_scale", self._shapes(rows)), FLOATS)
        scales = scale.float().reshape(-1, 1).expand(rows, 1).contiguous()
        return GroupedMatrix(kind="fp8", numbers=numbers, scales=scales, group_size=columns)

    def _shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return ((rows, 1), (rows,)) if self.by_row else ((1,), ())
