"""One rank's view of the KV pool: the cells of its heads. The pool has all heads, in the canonical order."""

import mmap
import os

import torch
from torch import Tensor

from engine.memory import KvLayout, layer_views
from kernels.kv_cells import Cells
from kvstore.kv_groups import KvGroups


class KvHeads:
    """Views of the pool's `blocks` [num_blocks, *layout.block_shape], which keep its memory mapped."""

    def __init__(self, blocks: Tensor, layout: KvLayout, groups: KvGroups | None, heads: range) -> None:
        own = blocks[:, :, :, heads.start : heads.stop]
        self._layers, self.layer_groups = layer_views(own, layout, groups)

    def layer(self, index: int) -> tuple[Cells, Cells]:
        """The layer's K and V, views [num_blocks, own heads, block_size, head_dim] (64-bit strides)."""
        return self._layers[index]


def map_pool(fd: int, layout: KvLayout, num_blocks: int) -> Tensor:
    """The pool of rank 0, writable, as `KvMemory.blocks` is there. Closes `fd`."""
    try:
        mapping = mmap.mmap(fd, num_blocks * layout.block_bytes, mmap.MAP_SHARED)
    finally:
        os.close(fd)
    return torch.frombuffer(mapping, dtype=layout.stored_dtype).view(num_blocks, *layout.block_shape)
