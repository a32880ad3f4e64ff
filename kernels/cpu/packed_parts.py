"""Grouped weights over one input that differ in numbers, groups or order of columns: each is packed in its own form."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.packed_groups import PackedGroups, pack_groups
from kernels.grouped import GroupedMatrix


@dataclass(frozen=True, slots=True, eq=False)
class PackedParts:
    """W [num_out, num_in], one part below the other."""

    parts: tuple[PackedGroups, ...]

    @property
    def num_out(self) -> int:
        return sum(part.num_out for part in self.parts)

    @property
    def num_in(self) -> int:
        return self.parts[0].num_in

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def columns(self) -> Iterator[tuple[PackedGroups, slice]]:
        """Each part, and where its results are among all."""
        start = 0
        for part in self.parts:
            yield part, slice(start, start + part.num_out)
            start += part.num_out


def pack_alike(
    module: Any, weights: Sequence[GroupedMatrix], dtype: torch.dtype, biases: Sequence[Tensor] = (), *, gated: bool
) -> PackedGroups | PackedParts:
    """As `pack_groups`, but that neighbours which can't be packed as one are parts. Raises ValueError."""
    if gated:
        return pack_groups(module, weights, dtype, biases, gated=True)
    parts = []
    for _, indices in groupby(range(len(weights)), key=_first_alike(weights).__getitem__):
        chosen = list(indices)
        alike = [weights[i] for i in chosen]
        parts.append(pack_groups(module, alike, dtype, [biases[i] for i in chosen] if biases else (), gated=False))
    return parts[0] if len(parts) == 1 else PackedParts(tuple(parts))


def _first_alike(weights: Sequence[GroupedMatrix]) -> list[int]:
    """For each the index of the first one of its form."""
    return [next(i for i, first in enumerate(weights) if first.is_like(weight)) for weight in weights]
