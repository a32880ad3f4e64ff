"""A rank's part of the model, and the steps it is told to compute."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from numpy.typing import NDArray

from engine.kernel_set import load_kernel_set
from engine.loading import load_part
from engine.lora.slots import AdapterSlots
from engine.lora.step import LoraStep
from engine.memory import KvLayers, KvMemory
from engine.models.decoder import Decoder
from engine.parallel.adapters import put_together
from engine.parallel.config import share_of_threads
from engine.parallel.devices import between_devices, free_memory, placing, take_device
from engine.parallel.group import RankGroup
from engine.parallel.heads import KvHeads, map_pool
from engine.parallel.kv_rows import take_rows
from engine.parallel.messages import Forward, Join, Load, Loaded, Logits, PutAdapter, PutBlocks
from engine.parallel.shard import Shard
from engine.parallel.shared_ranks import SharedRanks
from engine.parallel.tables import TablesReceiver
from engine.parallel.vocabulary import gather_logits
from engine.runner import Place, as_it_is, set_cpu_threads
from pagewire.config import EngineOptions


class Part:
    """Of one rank but the first."""

    def __init__(
        self,
        model: Decoder,
        shard: Shard,
        weights_digest: bytes,
        slots: AdapterSlots | None = None,
        gpu_memory_utilization: float = 1.0,
    ) -> None:
        self._weights_digest = weights_digest
        self._model = model
        self._device = model.kernels.device
        self._gpu_memory_utilization = gpu_memory_utilization
        self._place: Place = as_it_is
        self._shard = shard
        self._slots = slots
        self._tables = TablesReceiver()
        self._heads: KvLayers | None = None
        self._own_pool: KvMemory | None = None
        """Of its heads, where it can't have rank 0's."""
        self._tells = False
        self._group: RankGroup | None = None

    @classmethod
    def load(cls, load: Load, rank: int) -> "Part":
        """Raises ModelError."""
        options = EngineOptions.model_validate(load.options)
        threads = set_cpu_threads(share_of_threads(options, load.num_sharing))
        quantization = None if options.quantization == "none" else options.quantization
        kernels = load_kernel_set(options.kernels, threads, quantization, take_device(options, rank))
        part = load_part(options, kernels, rank)
        if part.model.config.shard is None:
            raise ValueError("a rank needs a shard")
        return cls(part.model, part.model.config.shard, part.digest, part.slots, options.gpu_memory_utilization)

    def loaded(self) -> Loaded:
        slot_bytes = 0 if self._slots is None else self._slots.num_layer_bytes
        free = free_memory(self._device, self._gpu_memory_utilization)
        return Loaded(self._weights_digest, self._model.numerics_class, max(0, free - slot_bytes))

    def join(self, join: Join, descriptors: Sequence[int], host: str | None = None) -> None:
        """Maps the pool behind the first descriptor, or makes one, and finds the other ranks. Closes the descriptors.

        `host`: this machine's address for the others, if rank 0 is on another one.
        """
        heads = self._shard.kv_heads
        if join.shares_pool:
            pool_fd, *descriptors = descriptors
            blocks = map_pool(pool_fd, join.layout, join.num_blocks)
            self._heads = KvHeads(blocks, join.layout, join.groups, heads)
        else:
            layout = replace(join.layout, num_kv_heads=len(heads))
            pool = KvMemory(layout, join.num_blocks, device=self._device, groups=join.groups)
            self._heads = self._own_pool = pool
        self._place = placing(self._model.kernels, self._model.config, join.layout)
        self._group = between_devices(_meet(join.meeting, descriptors, self._shard, host), self._model.kernels)
        self._tells = join.tells
        self._model.group = self._group

    def put_blocks(self, message: PutBlocks) -> None:
        """What came to rank 0 otherwise than by a step."""
        if self._own_pool is None:
            raise ValueError("its pool is rank 0's")
        self._own_pool.blocks[torch.from_numpy(message.block_ids)] = message.cells.tensor.to(self._device)

    def forward(self, step: Forward) -> None:
        """Stores the K and V of its heads; the result is the same on all ranks, and rank 0 has it."""
        if self._heads is None:
            raise ValueError("not joined")
        ids, positions = (torch.from_numpy(each).to(self._device) for each in (step.input_ids, step.positions))
        batch = self._tables.batch(step.changes)
        self._model.forward(ids, positions, self._place(batch), self._heads, self._adapters(step.slots))
        if self._tells and self._group is not None:
            self._group.gather(take_rows(self._heads, batch))

    def logits(self, rows: Logits) -> None:
        """Of its part of the vocabulary, to rank 0."""
        if self._group is None:
            raise ValueError("not joined")
        logits = self._model.logits(rows.hidden.tensor.to(self._device), self._adapters(rows.slots))
        gather_logits(logits, self._shard.most_token_ids, self._shard.vocab_size, self._group)

    def put(self, message: PutAdapter) -> None:
        """As all ranks do at once; if one can't, its slot stays empty on all."""
        if self._group is None or self._slots is None:
            raise ValueError("not joined, or without adapters")
        put_together(self._slots, message.slot, message.adapter, self._shard, self._group)

    def _adapters(self, slots: NDArray[Any] | None) -> LoraStep | None:
        return None if slots is None or self._slots is None else self._slots.step(slots.tolist())


def _meet(place: str, descriptors: Sequence[int], shard: Shard, host: str | None) -> RankGroup:
    """As `engine.parallel.meeting` on rank 0."""
    if place:
        from engine.parallel.process_ranks import ProcessRanks, file_store, reach_store  # it imports torch.distributed

        at = urlsplit(place)
        if at.scheme != "tcp":
            return ProcessRanks(file_store(Path(place), shard.size), shard.rank, shard.size)
        store = reach_store(str(at.hostname), at.port or 0, shard.size)
        return ProcessRanks(store, shard.rank, shard.size, host or str(at.hostname))
    (memory,) = descriptors
    try:
        ranks = SharedRanks(memory, shard.rank, shard.size)
    finally:
        os.close(memory)
    ranks.sum(torch.zeros(1))
    return ranks
