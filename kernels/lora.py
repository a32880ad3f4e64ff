"""Low-rank adapters of one batch: which rows have which adapter, and the adapters' matrices, a slot for each.

    y[row] += (x[row] Aᵀ) Bᵀ        A and B of the row's adapter; rows without one stay as they are, to the bit

The op itself is in `reference`, `tiled` and `cpu/native`. A projection made of several matrices (q, k and v) has as
many parts, each with an A and a rank of its own; their Bs lie side by side, transposed and with the scale in them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ROWS = 16
"""Rows of one adapter that are a task of the native op; no result depends on it."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraStack:
    """The adapters' matrices for one projection. `widths`: the columns of each part; `ranks` 0: part left alone.

    a [slots, parts, max_rank, num_in] and b [slots, max_rank, sum(widths)] in the compute dtype; ranks [slots, parts].
    For an embedding `a` is [slots, 1, num_ids, max_rank], so that a token's row lies in one place.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    widths: tuple[int, ...]
    columns: Tensor
    """`widths` as int64 [parts]."""

    @property
    def max_rank(self) -> int:
        return int(self.b.shape[1])

    def parts(self, slot: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(columns, A [rank, num_in], Bᵀ [rank, width]) of each part that the slot's adapter changes."""
        start = 0
        for part, width in enumerate(self.widths):
            columns = slice(start, start + width)
            if rank := int(self.ranks[slot, part]):
                yield columns, self.a[slot, part, :rank], self.b[slot, :rank, columns]
            start += width


@dataclass(frozen=True, slots=True, eq=False)
class LoraRows:
    """Rows that have an adapter, sorted by slot. `rows` int64 [M]; `groups` (slot, its part of `rows`).

    `blocks` int64 [num_blocks, 3]: slot, first and end in `rows`, of at most BLOCK_ROWS rows each.
    """

    rows: Tensor
    groups: tuple[tuple[int, Tensor], ...]
    blocks: Tensor

    @staticmethod
    def build(slots: Sequence[int]) -> "LoraRows | None":
        """`slots` has each row's slot, negative for none. None if no row has one."""
        order = sorted((row for row, slot in enumerate(slots) if slot >= 0), key=lambda row: (slots[row], row))
        if not order:
            return None
        rows = torch.tensor(order, dtype=torch.int64)
        groups: list[tuple[int, Tensor]] = []
        blocks: list[tuple[int, int, int]] = []
        start = 0
        while start < len(order):
            slot, end = slots[order[start]], start
            while end < len(order) and slots[order[end]] == slot:
                end += 1
            groups.append((slot, rows[start:end]))
            blocks += [(slot, at, min(at + BLOCK_ROWS, end)) for at in range(start, end, BLOCK_ROWS)]
            start = end
        return LoraRows(rows, tuple(groups), torch.tensor(blocks, dtype=torch.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Lora:
    """What one projection adds in one step."""

    stack: LoraStack
    rows: LoraRows


def add_to_embedding(x: Tensor, ids: Tensor, lora: Lora, scale: float | None) -> None:
    """x[row] += (A[:, id] Bᵀ) · scale, in float64 and in the order of the ranks; rounded once. ids [T], x [T, H]."""
    for slot, rows in lora.rows.groups:
        for _, _, b in lora.stack.parts(slot):
            shrunk = lora.stack.a[slot, 0][ids[rows]].double()  # [rows, max_rank]
            total = torch.zeros(len(rows), b.shape[1], dtype=torch.float64)
            for rank, row in enumerate(b.double()):
                total += shrunk[:, rank : rank + 1] * row
            total *= 1.0 if scale is None else scale
            x[rows] = (x[rows].double() + total).to(x.dtype)
