"""The device's room for adapters: as many slots as a step may have adapters, the least recently used gives way."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from engine.errors import EngineDied
from engine.lora.adapter import Adapter
from engine.lora.errors import AdapterLoadFailed
from engine.lora.step import LoraStep, SlottedStack
from engine.request import AdapterId
from engine.weight_source import Projection
from kernels.lora import LoraRows, LoraStack


class OtherSlots(Protocol):
    """Those of the other ranks, if the model is shared out."""

    def put(self, slot: int, adapter: Adapter) -> None:
        """Puts each rank's part into its slot, this one's too. Raises, with the slot empty everywhere, if one can't."""
        ...


class AdapterSlots:
    """Belongs to the device's thread. A projection's stack takes memory once an adapter that changes it comes."""

    def __init__(self, projections: Sequence[Projection], dtype: torch.dtype, *, max_loras: int, max_rank: int) -> None:
        self.max_loras = max_loras
        self.num_loads = 0
        self.on_change: Callable[[frozenset[bytes]], None] = lambda resident: None
        """Called with the keys of the adapters that are on the device, when those change."""
        self.others: OtherSlots | None = None
        self._dtype = dtype
        self._max_rank = max_rank
        self._projections = {name: projection for projection in projections for name in projection.names}
        self._stacks: dict[tuple[str, ...], SlottedStack] = {}
        self._used: dict[tuple[str, ...], set[int]] = {}
        self._resident: OrderedDict[bytes, int] = OrderedDict()

    @property
    def num_layer_bytes(self) -> int:
        """What the stacks of all layers take at most; those of embedding and head are rarely needed."""
        layers = {each.names: each for each in self._projections.values() if each.names[0].startswith("layers.")}
        per_rank = sum(len(each.names) * each.num_in + sum(each.num_outs) for each in layers.values())
        return self.max_loras * self._max_rank * per_rank * self._dtype.itemsize

    def assign(self, adapters: Iterable[AdapterId]) -> Mapping[bytes, int]:
        """A slot for each adapter of a step, by its key.

        Raises ValueError for more than there are slots, and AdapterLoadFailed for one that can't be loaded.
        """
        wanted = {each.key: each for each in adapters}
        if len(wanted) > self.max_loras:
            raise ValueError(f"a step has {len(wanted)} adapters, there are {self.max_loras} slots")
        for key in wanted:
            if key in self._resident:
                self._resident.move_to_end(key)
        missing = [adapter for key, adapter in wanted.items() if key not in self._resident]
        try:
            for adapter in missing:
                slot = self._free_slot(wanted)
                self._load(slot, adapter)
                self._resident[adapter.key] = slot
        finally:
            if missing:
                self.on_change(frozenset(self._resident))
        return {key: self._resident[key] for key in wanted}

    def step(self, slots: Sequence[int]) -> LoraStep | None:
        """The step of rows with these slots, negative for none; None if no row has one."""
        rows = LoraRows.build(slots)
        return None if rows is None else LoraStep(self._stacks, rows, tuple(slots))

    def put(self, slot: int, adapter: Adapter) -> None:
        """The adapter's matrices, of the shapes that the projections have here. If it raises, the slot is empty."""
        self.clear(slot)
        try:
            stacks = {name: self._stack(self._projections[name]) for name in adapter.modules}
            self._write(slot, adapter, stacks)
        except BaseException:
            self.clear(slot)  # half of an adapter must not stay for the next one
            raise

    def clear(self, slot: int) -> None:
        """The slot changes nothing any more."""
        for names, used in self._used.items():
            used.discard(slot)
            self._stacks[names].stack.ranks[slot] = 0

    def _free_slot(self, wanted: Mapping[bytes, AdapterId]) -> int:
        if len(self._resident) < self.max_loras:
            return min(set(range(self.max_loras)) - set(self._resident.values()))
        oldest = next(key for key in self._resident if key not in wanted)
        return self._resident.pop(oldest)

    def _load(self, slot: int, adapter: AdapterId) -> None:
        if not isinstance(adapter.weights, Adapter):
            raise ValueError(f"adapter {adapter.name!r} comes without its weights")
        self.num_loads += 1
        try:
            (self.put if self.others is None else self.others.put)(slot, adapter.weights)
        except EngineDied:
            raise
        except Exception as error:
            message = f"adapter {adapter.name!r} can't be put on the device: {type(error).__name__}: {error}"
            raise AdapterLoadFailed(adapter.key, message) from error

    def _write(self, slot: int, adapter: Adapter, stacks: Mapping[str, LoraStack]) -> None:
        for name, matrices in adapter.modules.items():
            projection, stack = self._projections[name], stacks[name]
            part, rank = projection.names.index(name), matrices.rank
            stack.ranks[slot, part] = rank
            if name == "embed_tokens":
                stack.a[slot, part, :, :rank] = matrices.a
                stack.a[slot, part, :, rank:] = 0.0
            else:
                stack.a[slot, part, :rank] = matrices.a
            start = sum(stack.widths[:part])
            stack.b[slot, :rank, start : start + stack.widths[part]] = matrices.b
            self._used[projection.names].add(slot)

    def _stack(self, projection: Projection) -> LoraStack:
        found = self._stacks.get(projection.names)
        if found is None:
            made = self._make(projection)
            used = self._used[projection.names] = set()
            found = self._stacks[projection.names] = SlottedStack(made, used)
        return found.stack

    def _make(self, projection: Projection) -> LoraStack:
        is_embedding = projection.names == ("embed_tokens",)
        widths = (projection.num_in,) if is_embedding else projection.num_outs
        inner = (projection.num_outs[0], self._max_rank) if is_embedding else (self._max_rank, projection.num_in)
        parts = len(projection.names)
        return LoraStack(
            a=torch.zeros(self.max_loras, parts, *inner, dtype=self._dtype),
            b=torch.zeros(self.max_loras, self._max_rank, sum(widths), dtype=self._dtype),
            ranks=torch.zeros(self.max_loras, parts, dtype=torch.int64),
            widths=widths,
            columns=torch.tensor(widths, dtype=torch.int64),
        )
