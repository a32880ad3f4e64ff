"""Adapters on several ranks: each has of A and B what meets its part of the layer that they change.

q, k, v, gate, up, head   B's rows; A whole, for the input is     (each rank has some of the outputs)
o, down                   A's columns; B whole: what each gives is added up with the layer's own products
embedding                 A's columns of its token ids; B whole

Rank 0 alone reads adapters and knows their names; the others have slots, which it fills in the order of the steps.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from engine.errors import EngineDied
from engine.lora.adapter import Adapter, LoraMatrices
from engine.lora.slots import AdapterSlots
from engine.parallel.group import RankGroup
from engine.parallel.messages import PutAdapter
from engine.parallel.shard import Shard
from engine.weight_source import Projection

logger = logging.getLogger(__name__)


class OtherRanks(Protocol):
    """Those that must get their parts."""

    def tell_each(self, message: Callable[[int], object]) -> None:
        """Sends each the message for its rank. Raises EngineDied if one has ended."""
        ...

    def lost(self, error: Exception) -> EngineDied: ...


def whole_projections(projections: Sequence[Projection], shard: Shard | None) -> tuple[Projection, ...]:
    """The whole model's, of which a rank with this shard has `projections`."""
    if shard is None:
        return tuple(projections)
    return tuple(_whole(each, shard) for each in projections)


def cut_adapter(adapter: Adapter, shard: Shard) -> Adapter:
    """What a rank has of it; its digest is the whole one's."""
    return replace(adapter, modules={name: _cut(name, each, shard) for name, each in adapter.modules.items()})


class SharedSlots:
    """Rank 0's slots with those of all other ranks, which always have the same adapters."""

    def __init__(self, own: AdapterSlots, shard: Shard, group: RankGroup, others: OtherRanks) -> None:
        self._own = own
        self._shard = shard
        self._group = group
        self._others = others

    def put(self, slot: int, adapter: Adapter) -> None:
        """On all ranks, or on none: then raises what went wrong here or, of another rank, a MemoryError."""

        def message(rank: int) -> PutAdapter:
            return PutAdapter.of(slot, cut_adapter(adapter, replace(self._shard, rank=rank)))

        self._others.tell_each(message)
        try:
            error = put_together(self._own, slot, cut_adapter(adapter, self._shard), self._shard, self._group)
        except Exception as failed:
            raise self._others.lost(failed) from failed
        if error is not None:
            raise error


def put_together(slots: AdapterSlots, slot: int, part: Adapter, shard: Shard, group: RankGroup) -> Exception | None:
    """This rank's part of an adapter, which stays if all could put theirs; else the reason. All call it at once."""
    error: Exception | None = None
    try:
        slots.put(slot, part)
    except Exception as failed:
        logger.warning("rank %d can't put an adapter into slot %d: %r", shard.rank, slot, failed)
        error = failed
    num_done = int(group.sum(torch.tensor([float(error is None)])))
    if num_done == shard.size:
        return None
    slots.clear(slot)
    return error or MemoryError(f"{shard.size - num_done} of {shard.size} ranks have no room for their part")


def _whole(projection: Projection, shard: Shard) -> Projection:
    shapes = [
        shard.cut(f"{name}.weight", (rows, projection.num_in)).whole
        for name, rows in zip(projection.names, projection.num_outs, strict=True)
    ]
    return replace(projection, num_outs=tuple(rows for rows, _ in shapes), num_in=shapes[0][1])


def _cut(name: str, whole: LoraMatrices, shard: Shard) -> LoraMatrices:
    """a [rank, num_in], b [rank, num_out]; of an embedding a [num_ids, rank]."""
    if name == "embed_tokens":
        ids = shard.vocabulary
        return LoraMatrices(whole.a[ids.start : ids.stop], whole.b)
    columns, rows = shard.columns(name, whole.a.shape[1]), shard.rows(name, whole.b.shape[1])
    return LoraMatrices(whole.a[:, columns.start : columns.stop], whole.b[:, rows.start : rows.stop])
