"""Rows of rotary tables, computed once: a decode step wants a few of them, which torch takes ten calls to make."""

import torch
from torch import Tensor

from kernels import tiled

KEPT_POSITIONS = 8192
"""Of longer sequences the rest is computed in each step. 8 MB for a head of 256."""
MOST_ROWS = 64
"""Of more rows the calls are a small part of the work."""
_GROWTH = 512


class RopeRows:
    """cos and sin of position · inv_freq, times `scaling`, to the bits of `tiled.rope_tables`."""

    def __init__(self, inv_freq: Tensor, scaling: float) -> None:
        self._inv_freq = inv_freq
        self._scaling = scaling
        self._cos, self._sin = tiled.rope_tables(torch.arange(0), inv_freq, scaling)

    def of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [T] -> float32 [T, D / 2] each; to be read only."""
        if len(positions) == 1:
            position = int(positions.item())
            if position < KEPT_POSITIONS:
                self._grow(position)
                return self._cos[position : position + 1], self._sin[position : position + 1]
        elif 1 < len(positions) <= MOST_ROWS and (last := int(positions.max())) < KEPT_POSITIONS:
            self._grow(last)
            return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        return tiled.rope_tables(positions, self._inv_freq, self._scaling)

    def _grow(self, position: int) -> None:
        if position >= len(self._cos):
            num_rows = (position // _GROWTH + 1) * _GROWTH
            self._cos, self._sin = tiled.rope_tables(torch.arange(num_rows), self._inv_freq, self._scaling)
