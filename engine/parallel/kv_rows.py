"""What a step has stored of its tokens, in bytes: rows of cells, taken out of one pool and put into another."""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.memory import KvLayers
from kernels.kv_cells import QuantizedCells
from kernels.paged import PagedBatch


def take_rows(layers: KvLayers, batch: PagedBatch) -> Tensor:
    """The batch's tokens as the pool has them, one layer after another. -> uint8 [num_bytes]"""
    parts = [
        numbers[slots.slot_blocks, :, slots.slot_offsets].flatten().view(torch.uint8)
        for numbers, slots in _cells(layers, batch)
    ]
    return torch.cat(parts)


def put_rows(layers: KvLayers, batch: PagedBatch, rows: Tensor) -> None:
    """What `take_rows` gave of another pool with the same heads."""
    start = 0
    for numbers, slots in _cells(layers, batch):
        shape = torch.Size((batch.num_tokens, numbers.shape[1], *numbers.shape[3:]))
        end = start + shape.numel() * numbers.itemsize
        values = rows[start:end].clone().view(numbers.dtype)  # a copy begins where its type may
        numbers[slots.slot_blocks, :, slots.slot_offsets] = values.view(shape)
        start = end


def _cells(layers: KvLayers, batch: PagedBatch) -> Iterator[tuple[Tensor, PagedBatch]]:
    """Each layer's numbers [num_blocks, heads, block_size, …] and the batch as its KV group sees it."""
    for layer, group in enumerate(layers.layer_groups):
        keys, values = layers.layer(layer)
        for cells in (keys,) if keys is values else (keys, values):
            for numbers in (cells.values, cells.scales) if isinstance(cells, QuantizedCells) else (cells,):
                yield numbers, batch.of_group(group)
