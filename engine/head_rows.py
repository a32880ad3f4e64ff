"""A step's rows that sample, before the output matrix: whoever draws from them has logits made as it needs them."""

from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor

from engine.lora.step import LoraStep


class LogitsModel(Protocol):
    """Hidden states [R, hidden] -> logits [R, V]; see `engine.models.decoder.Model`."""

    def logits(self, hidden: Tensor, adapters: LoraStep | None = None) -> Tensor: ...


class PlainHead(Protocol):
    """A model whose logits are the product of `head_input` and `head`, unless that says otherwise."""

    @property
    def head(self) -> Any: ...
    def head_input(self, hidden: Tensor, adapters: LoraStep | None = None) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class HeadRows:
    """hidden [R, hidden]; `adapters` are those rows'."""

    model: LogitsModel
    hidden: Tensor
    adapters: LoraStep | None = None

    def logits(self) -> Tensor:
        """All of them, float32 [R, V]."""
        return self.model.logits(self.hidden, self.adapters)

    def product(self) -> tuple[Tensor, Any] | None:
        """(x [R, hidden], the packed W [V, hidden]) with logits = x Wᵀ; None where more happens to them."""
        if not hasattr(self.model, "head_input"):  # asking a protocol takes twenty times as long
            return None
        model = cast(PlainHead, self.model)
        x = model.head_input(self.hidden, self.adapters)
        return None if x is None else (x, model.head)
