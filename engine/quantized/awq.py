"""AWQ's tensors ("gemm"): codes of eight neighbouring rows of W in one number, in an interleaved order.

W[n, k] = (code[k, n] - zero[g, n]) · scales[g, n],   g = k // group_size

qweight     int32 [K, N / 8]
qzeros      int32 [G, N / 8]
scales      [G, N]
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.quantized.stored import FLOATS, INTEGERS, StoredMatrix, num_groups, unpack, zero_offsets
from kernels.grouped import GroupedMatrix

_BITS, _PER_NUMBER = 4, 8
_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""Where in a number the code of its first, second, … row lies."""


@dataclass(frozen=True, slots=True)
class Awq:
    """`group_size` -1: one group."""

    group_size: int

    marker = "qweight"
    suffixes = ("qweight", "qzeros", "scales")

    @property
    def label(self) -> str:
        return f"awq4g{self.group_size}"

    def read(self, matrix: StoredMatrix, rows: int, columns: int) -> GroupedMatrix:
        """Raises ValueError."""
        if rows % _PER_NUMBER:
            raise matrix.error("qweight", f"stands for {rows} rows; it must be a multiple of {_PER_NUMBER}")
        groups = num_groups(columns, self.group_size)
        codes = _rows(matrix.take("qweight", (columns, rows // _PER_NUMBER), INTEGERS))
        zeros = _rows(matrix.take("qzeros", (groups, rows // _PER_NUMBER), INTEGERS))
        scales = matrix.take("scales", (groups, rows), FLOATS).T.float().contiguous()
        return GroupedMatrix(
            kind="int4",
            numbers=(codes - (1 << (_BITS - 1))).char(),
            scales=scales,
            group_size=columns if self.group_size == -1 else self.group_size,
            offsets=zero_offsets(scales, zeros, _BITS),
        )


def _rows(packed: Tensor) -> Tensor:
    """int32 [M, N / 8] -> codes int16 [N, M]."""
    return unpack(packed, _BITS)[:, :, _PLACES].flatten(1).T.contiguous()
