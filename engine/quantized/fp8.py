"""FP8 with a scale for each block of a matrix, as DeepSeek-V3 has it (quant_method "fp8", weight_block_size).

W[n, k] = weight[n, k] · weight_scale_inv[n // block rows, k // block columns]

weight              float8_e4m3fn [N, K]
weight_scale_inv    [ceil(N / block rows), ceil(K / block columns)]; the last blocks may be smaller
input_scale         of activations; unused: here activations stay in the compute dtype
"""

from dataclasses import dataclass

import torch

from engine.quantized.stored import FLOATS, StoredMatrix
from kernels.grouped import GroupedMatrix


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """`block_columns` is a group size of `kernels.grouped`."""

    block_rows: int
    block_columns: int

    marker = "weight_scale_inv"
    suffixes = ("weight", "weight_scale_inv", "input_scale")

    @property
    def label(self) -> str:
        return f"fp8b{self.block_rows}x{self.block_columns}"

    def read(self, matrix: StoredMatrix, rows: int, columns: int) -> GroupedMatrix:
        """Raises ValueError."""
        numbers = matrix.take("weight", (rows, columns), (torch.float8_e4m3fn,))
        blocks = (-(-rows // self.block_rows), -(-columns // self.block_columns))
        scales = matrix.take("weight_scale_inv", blocks, FLOATS).float()
        by_row = scales.repeat_interleave(self.block_rows, dim=0)[:rows].contiguous()
        return GroupedMatrix(kind="fp8", numbers=numbers, scales=by_row, group_size=self.block_columns)
