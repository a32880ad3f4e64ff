"""GPTQ's tensors: codes packed along the columns, zero points (less one in the first format), groups by g_idx.

W[n, k] = (code[k, n] - zero[g, n]) · scales[g, n],   g = g_idx[k]

qweight     int32 [K · bits / 32, N], the codes of neighbouring k in one number, lowest bits first
qzeros      int32 [G, N · bits / 32], of neighbouring n; "gptq" stores zero - 1, "gptq_v2" the zero
scales      [G, N]
g_idx       int32 [K]; with act-order (desc_act) a group's columns lie apart
"""

from dataclasses import dataclass

from engine.quantized.stored import FLOATS, INTEGERS, StoredMatrix, column_order, num_groups, unpack, zero_offsets
from kernels.grouped import GroupedMatrix


@dataclass(frozen=True, slots=True)
class Gptq:
    """`group_size` -1: one group. `zeros_stored_less_one`: the first format."""

    bits: int
    group_size: int
    desc_act: bool
    zeros_stored_less_one: bool

    marker = "qweight"
    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    @property
    def label(self) -> str:
        return f"gptq{self.bits}g{self.group_size}" + ("" if self.zeros_stored_less_one else "v2")

    def read(self, matrix: StoredMatrix, rows: int, columns: int) -> GroupedMatrix:
        """Raises ValueError."""
        per_number = 32 // self.bits
        for size, what in ((rows, "rows"), (columns, "columns")):
            if size % per_number:
                raise matrix.error("qweight", f"stands for {size} {what}; it must be a multiple of {per_number}")
        groups = num_groups(columns, self.group_size)
        packed = matrix.take("qweight", (columns // per_number, rows), INTEGERS)
        packed_zeros = matrix.take("qzeros", (groups, rows // per_number), INTEGERS)
        scales = matrix.take("scales", (groups, rows), FLOATS).T.float().contiguous()
        order = None
        if self.desc_act or matrix.has("g_idx"):
            order = column_order(matrix, "g_idx", columns, self.group_size)
        codes = unpack(packed.T, self.bits).reshape(rows, columns)
        if order is not None:
            codes = codes[:, order]
        zeros = unpack(packed_zeros, self.bits).reshape(groups, rows).T + int(self.zeros_stored_less_one)
        return GroupedMatrix(
            kind="int4" if self.bits == 4 else "int8",
            numbers=(codes - (1 << (self.bits - 1))).char(),
            scales=scales,
            group_size=columns if self.group_size == -1 else self.group_size,
            offsets=zero_offsets(scales, zeros, self.bits),
            order=order,
        )
