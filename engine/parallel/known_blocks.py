"""Which blocks the ranks on other machines have as rank 0's pool has them. Pure.

They compute every step themselves, so they lack what came otherwise: blocks that were pulled, fetched, loaded from a
tier or copied. A block that is handed out anew has a new generation, and nobody has anything of it.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from engine.parallel.tables import num_repeated
from kernels.paged import PagedBatch


class KnownBlocks:
    """Of each block the generation that is known, and how many of its first tokens."""

    def __init__(self, num_blocks: int) -> None:
        self._generations = np.zeros(num_blocks, np.uint64)
        self._num_tokens = np.zeros(num_blocks, np.int64)

    def missing(self, batch: PagedBatch, generations: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The blocks of tokens before the step's own, of which something is not known. `generations`: the pool's."""
        query_lens = np.diff(batch.cu_seqlens)
        found = [
            blocks[(self._num_tokens[blocks] < tokens) | (self._generations[blocks] != generations[blocks])]
            for blocks, tokens in _tokens_in_blocks(batch, [*np.subtract(batch.kv_lens, query_lens).tolist()])
        ]
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)

    def note(self, batch: PagedBatch, generations: NDArray[np.uint64]) -> None:
        """Everything that the step reads and stores is known now."""
        for blocks, tokens in _tokens_in_blocks(batch, batch.kv_lens):
            known = np.where(self._generations[blocks] == generations[blocks], self._num_tokens[blocks], 0)
            self._num_tokens[blocks] = np.maximum(known, tokens)
            self._generations[blocks] = generations[blocks]


def _tokens_in_blocks(
    batch: PagedBatch, lengths: "tuple[int, ...] | list[int]"
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Of each sequence in each KV group the blocks of its first `lengths[s]` tokens, and how many each has of them."""
    size = batch.block_size
    for group in (batch, *batch.others):
        for row, length in zip(group.block_tables.numpy(), lengths, strict=True):
            blocks = row[: -(-length // size)]
            first = num_repeated(blocks)  # before it entries stand for nothing
            ends = length - size * np.arange(first, len(blocks))
            yield blocks[first:], np.minimum(ends, size)
