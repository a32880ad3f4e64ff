"""What the ranks of one model say to each other in a step: sums, and the logits' parts."""

from typing import Protocol

from torch import Tensor

STEP_SECONDS = 300.0
"""A rank that is silent for so long in the middle of a step is given up."""


class RankGroup(Protocol):
    """All ranks call the same methods in the same order, with tensors of one shape."""

    def sum(self, x: Tensor) -> Tensor:
        """The ranks' x added up in the order of the ranks: a row of it depends on that row's parts alone. float32."""
        ...

    def gather(self, x: Tensor) -> Tensor | None:
        """The ranks' x, [ranks, *x.shape], on rank 0; None on the others."""
        ...

    def gather_all(self, x: Tensor) -> Tensor:
        """The same on all ranks."""
        ...


def side_by_side(x: Tensor, group: RankGroup) -> Tensor:
    """Each rank's columns one after another, on all ranks. [T, K] -> [T, ranks · K]."""
    return group.gather_all(x).transpose(0, 1).flatten(1)
