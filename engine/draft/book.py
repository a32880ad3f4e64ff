"""How much of each block's tokens the draft model has computed. Pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Counts = NDArray[np.int64]


class DraftBook:
    """Block b of the pool has a place for the draft model's KV too, in a memory of its own: one block table for both.

        block table      [ b0 | b1 | b2 | b3 ]
        the model's KV   [ full | full | full | 5 tokens ]     prefix cache, transfers and tiers know this one alone
        the draft's KV   [ full | 7 tokens | full | - ]        filled 16 + 7 tokens: the draft goes on from there

    A block's count holds as long as the block is not handed out anew, which its generation in the pool tells. So there
    is nothing to free: a sequence that is preempted, aborted or done takes its blocks away and the counts with them,
    who shares a prefix shares its drafts' KV, and who got blocks from elsewhere finds them unfilled. What a draft
    wrote for tokens that were rejected is never counted, and overwritten.
    """

    def __init__(self, block_size: int, generations: NDArray[np.uint64]) -> None:
        """`generations` is the pool's own array, [num_blocks]."""
        self.block_size = block_size
        self._generations = generations
        self._counts: _Counts = np.zeros(len(generations), dtype=np.int64)
        self._as_of = generations.copy()

    def num_filled(self, block_table: Sequence[int]) -> int:
        """The first so many tokens of the table have the draft's KV."""
        counts = self._valid(np.asarray(block_table, dtype=np.int64))
        gaps = np.flatnonzero(counts < self.block_size)
        if not len(gaps):
            return len(block_table) * self.block_size
        first = int(gaps[0])
        return first * self.block_size + int(counts[first])

    def fill(self, block_table: Sequence[int], start: int, end: int) -> None:
        """The tokens at positions `start` to `end` have it now, as those before them had."""
        first = start // self.block_size
        blocks = np.asarray(block_table[first : -(-end // self.block_size)], dtype=np.int64)
        ends = end - self.block_size * np.arange(first, first + len(blocks), dtype=np.int64)
        self._counts[blocks] = np.maximum(self._valid(blocks), np.minimum(ends, self.block_size))
        self._as_of[blocks] = self._generations[blocks]

    def _valid(self, blocks: _Counts) -> _Counts:
        return np.where(self._as_of[blocks] == self._generations[blocks], self._counts[blocks], 0)
