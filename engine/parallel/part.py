"""A rank's part of the model, and the steps it is told to compute."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from engine.kernel_set import load_kernel_set
from engine.loading import load_part
from engine.lora.slots import AdapterSlots
from engine.lora.step import LoraStep
from engine.models.decoder import Decoder
from engine.parallel.adapters import put_together
from engine.parallel.group import RankGroup
from engine.parallel.heads import KvHeads, map_pool
from engine.parallel.messages import Forward, Join, Load, Logits, PutAdapter
from engine.parallel.shard import Shard
from engine.parallel.shared_ranks import SharedRanks
from engine.parallel.tables import TablesReceiver
from engine.parallel.vocabulary import gather_logits
from engine.runner import set_cpu_threads
from pagewire.config import EngineOptions


class Part:
    """Of one rank but the first."""

    def __init__(self, model: Decoder, shard: Shard, weights_digest: bytes, slots: AdapterSlots | None = None) -> None:
        self.weights_digest = weights_digest
        self._model = model
        self._shard = shard
        self._slots = slots
        self._tables = TablesReceiver()
        self._heads: KvHeads | None = None
        self._group: RankGroup | None = None

    @classmethod
    def load(cls, load: Load, rank: int) -> "Part":
        """Raises ModelError."""
        options = EngineOptions.model_validate(load.options)
        set_cpu_threads(load.threads)
        quantization = None if options.quantization == "none" else options.quantization
        kernels = load_kernel_set(options.kernels, load.threads, quantization, options.device)
        part = load_part(options, kernels, rank)
        if part.model.config.shard is None:
            raise ValueError("a rank needs a shard")
        return cls(part.model, part.model.config.shard, part.digest, part.slots)

    def join(self, join: Join, descriptors: Sequence[int]) -> None:
        """Maps the pool behind the first descriptor and finds the other ranks. Closes the descriptors."""
        pool, *others = descriptors
        shard = self._shard
        blocks = map_pool(pool, join.layout, join.num_blocks)
        self._heads = KvHeads(blocks, join.layout, join.groups, shard.kv_heads)
        self._group = _meet(join.meeting, others, shard)
        self._model.group = self._group

    def forward(self, step: Forward) -> None:
        """Stores the K and V of its heads; the result is the same on all ranks, and rank 0 has it."""
        if self._heads is None:
            raise ValueError("not joined")
        ids, positions = torch.from_numpy(step.input_ids), torch.from_numpy(step.positions)
        batch = self._tables.batch(step.changes)
        self._model.forward(ids, positions, batch, self._heads, self._adapters(step.slots))

    def logits(self, rows: Logits) -> None:
        """Of its part of the vocabulary, to rank 0."""
        if self._group is None:
            raise ValueError("not joined")
        logits = self._model.logits(rows.hidden.tensor, self._adapters(rows.slots))
        gather_logits(logits, self._shard.most_token_ids, self._shard.vocab_size, self._group)

    def put(self, message: PutAdapter) -> None:
        """As all ranks do at once; if one can't, its slot stays empty on all."""
        if self._group is None or self._slots is None:
            raise ValueError("not joined, or without adapters")
        put_together(self._slots, message.slot, message.adapter, self._shard, self._group)

    def _adapters(self, slots: NDArray[Any] | None) -> LoraStep | None:
        return None if slots is None or self._slots is None else self._slots.step(slots.tolist())


def _meet(file: str, descriptors: Sequence[int], shard: Shard) -> RankGroup:
    """As `engine.parallel.meeting` on rank 0."""
    if file:
        from engine.parallel.process_ranks import ProcessRanks  # it imports torch.distributed

        return ProcessRanks(Path(file), shard.rank, shard.size)
    (memory,) = descriptors
    try:
        ranks = SharedRanks(memory, shard.rank, shard.size)
    finally:
        os.close(memory)
    ranks.sum(torch.zeros(1))
    return ranks
