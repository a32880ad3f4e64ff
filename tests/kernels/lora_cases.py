"""Stacks of random adapters, and rows that have them."""

import torch
from torch import Tensor

from kernels.lora import Lora, LoraRows, LoraStack

MAX_RANK = 12
RANKS = ((8, 3, 1), (1, 0, 12), (0, 0, 0), (12, 12, 12), (5, 9, 0))
"""By slot and part."""


def make_stack(widths: tuple[int, ...], depth: int, dtype: torch.dtype) -> LoraStack:
    """A slot for each of RANKS. What lies beyond a rank is NaN: nobody may look at it."""
    generator = torch.Generator().manual_seed(depth)
    parts = len(widths)
    a = torch.randn(len(RANKS), parts, MAX_RANK, depth, generator=generator) * depth**-0.5
    b = torch.randn(len(RANKS), MAX_RANK, sum(widths), generator=generator)
    ranks = torch.tensor([each[:parts] for each in RANKS], dtype=torch.int64)
    for slot, of_slot in enumerate(ranks.tolist()):
        start = 0
        for part, rank in enumerate(of_slot):
            a[slot, part, rank:] = torch.nan
            b[slot, rank:, start : start + widths[part]] = torch.nan
            start += widths[part]
    columns = torch.tensor(widths, dtype=torch.int64)
    return LoraStack(a.to(dtype), b.to(dtype), ranks, widths, columns)


def of_rows(stack: LoraStack, slots: list[int]) -> Lora | None:
    """Rows with these slots."""
    rows = LoraRows.build(slots)
    return None if rows is None else Lora(stack, rows)


def expected(y: Tensor, x: Tensor, stack: LoraStack, slots: list[int]) -> Tensor:
    """In float64, row by row."""
    out = y.double().clone()
    for row, slot in enumerate(slots):
        for columns, a, b in stack.parts(slot) if slot >= 0 else ():
            out[row, columns] += x[row].double() @ a.double().t() @ b.double()
    return out
