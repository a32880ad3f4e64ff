"""Rows for a product to read many of side by side."""

import torch
from torch import Tensor

LINE_BYTES = 64
CROWDED_BYTES = 1024
FEW_ROWS = 8


def spaced_rows(num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """An uninitialized [num_rows, size] whose rows a first-level cache can hold together.

    Rows a multiple of 1 KiB apart begin in four of its 64 sets, or fewer: tiles of 32 rows then come from L2 each time
    (K = 2048 in bfloat16 took twice as long). Such rows are a line further apart.
    """
    if num_rows <= FEW_ROWS or size * dtype.itemsize % CROWDED_BYTES:
        return torch.empty(num_rows, size, dtype=dtype)
    return torch.empty(num_rows, size + LINE_BYTES // dtype.itemsize, dtype=dtype)[:, :size]
