"""One rank's view of the KV pool: the cells of its heads. The pool has all heads, in the canonical order."""

import mmap
import os

import torch
from torch import Tensor

from engine.memory import KvLayout


class KvHeads:
    """Views of `blocks` [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], which keep its memory."""

    def __init__(self, blocks: Tensor, heads: range) -> None:
        own = blocks[:, :, :, heads.start : heads.stop]
        self._layers = tuple((own[:, layer, 0], own[:, layer, 1]) for layer in range(blocks.shape[1]))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """The layer's K and V, views [num_blocks, own heads, block_size, head_dim] (64-bit strides)."""
        return self._layers[index]


def map_pool(fd: int, layout: KvLayout, num_blocks: int) -> Tensor:
    """The pool of rank 0, writable, as `KvMemory.blocks` is there. Closes `fd`."""
    try:
        mapping = mmap.mmap(fd, num_blocks * layout.block_bytes, mmap.MAP_SHARED)
    finally:
        os.close(fd)
    return torch.frombuffer(mapping, dtype=layout.dtype).view(num_blocks, *layout.block_shape)
