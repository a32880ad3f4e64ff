"""The adapters of one step: for each projection what they add, and to which rows."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kernels.lora import Lora, LoraRows, LoraStack


@dataclass(frozen=True, slots=True)
class SlottedStack:
    """A projection's stack and the slots whose adapters change it."""

    stack: LoraStack
    slots: Collection[int]


@dataclass(frozen=True, slots=True)
class LoraStep:
    """`rows` are those of one tensor of activations: a step's tokens, or the rows whose logits are made."""

    stacks: Mapping[tuple[str, ...], SlottedStack]
    rows: LoraRows
    slots: tuple[int, ...]
    """Of each row, negative for none: what `rows` is made of."""

    def of(self, names: tuple[str, ...]) -> Lora | None:
        """What the batch's adapters add to the projection made of the matrices `names`; None if nothing."""
        found = self.stacks.get(names)
        if found is None or not any(slot in found.slots for slot, _ in self.rows.groups):
            return None
        return Lora(found.stack, self.rows)
