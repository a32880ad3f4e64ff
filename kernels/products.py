"""Several products that a kernel set may compute in one go: a mixture's experts, the heads of latent attention."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """out = x Wᵀ, with an activation of a gated weight. x [M, K], out [M, N]: rows may be any distance apart."""

    x: Tensor
    weight: Any
    out: Tensor


def one_by_one(products: Iterable[Product], compute: Callable[[Tensor, Any], Tensor]) -> None:
    """What computing them together must equal, bit for bit."""
    for each in products:
        each.out.copy_(compute(each.x, each.weight))
