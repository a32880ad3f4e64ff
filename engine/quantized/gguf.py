"""GGUF's blocks of 32 numbers with one scale, as `engine/gguf_blocks.py` writes them beside each other.

W[n, k] = number[n, k] · scales[n, k // 32]

numbers     of Q4_0: uint8 [N, K / 2], two int4 in a byte, the first in its lower half; of Q8_0: int8 [N, K]
scales      float16 [N, K / 32]
"""

from dataclasses import dataclass

import torch

from engine.quantized.stored import FLOATS, StoredMatrix
from kernels.grouped import GroupedMatrix

GROUP = 32


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """Matrices may differ in kind."""

    marker = "numbers"
    suffixes = ("numbers", "scales")

    @property
    def label(self) -> str:
        return "gguf"

    def read(self, matrix: StoredMatrix, rows: int, columns: int) -> GroupedMatrix:
        """Raises ValueError."""
        shapes = ((rows, columns), (rows, columns // 2))
        shape = matrix.shape_among("numbers", shapes)
        packed = shape == shapes[1]
        numbers = matrix.take("numbers", shape, (torch.uint8,) if packed else (torch.int8,))
        scales = matrix.take("scales", (rows, columns // GROUP), FLOATS).float()
        if packed:
            both = torch.stack((numbers << 4, numbers), dim=2).flatten(1)  # the number in the upper half
            numbers = both.view(torch.int8) >> 4
        return GroupedMatrix("int4" if packed else "int8", numbers, scales, GROUP)
