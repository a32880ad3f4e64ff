"""What several prompts begin with is computed once: who has waited for it takes the blocks over in its turn.

Sequences that come together find nothing in the cache. One computes the beginning (`engine/token_budget.py` decides
who), the others have no tokens in that step, and go on behind it:

    first    [ computed | this step | .......... ]
    second   [    found |     waits | .... ]          next block: the one that the first computes

What came late of a preempted sequence is found in the same way.
"""

from engine.block_tables import BlockTables
from engine.kv_cache import KvCache
from engine.sequence import Sequence
from kvstore.kv_groups import RELEASED


class CommonPrefixes:
    """Of sequences that run and have tokens of their prompt to compute."""

    def __init__(self, cache: KvCache, tables: BlockTables) -> None:
        self._cache = cache
        self._tables = tables

    def look_up(self, sequence: Sequence) -> tuple[bytes | None, int]:
        """The key of the block that is to be computed next, and how many tokens before it others have computed.

        None: it must compute that block, whoever has it.
        """
        at, most = sequence.num_committed_blocks, self._tables.most_cached(sequence)
        if not self._cache.enable_caching or at >= most:
            return None, 0
        self._tables.extend_keys(sequence)
        size, last, depth = self._cache.block_size, sequence.num_tokens - 1, at
        if self._cache.is_cached(sequence.keys[at]):
            depth = self._cache.num_cached_keys(sequence.keys[:most])
        num_found = max(0, min(depth * size, last) - sequence.num_computed_tokens)
        # For the block of its last token nobody waits: to wait costs a step, to compute it beside some tokens.
        return (sequence.keys[depth] if depth < last // size else None), num_found

    def take_over(self, sequence: Sequence) -> None:
        """Gives it the blocks that others have computed since it was looked up, in the place of its own empty ones."""
        at = sequence.num_committed_blocks
        if not self._cache.enable_caching or at >= self._tables.most_cached(sequence):
            return
        if not self._cache.is_cached(sequence.keys[at]):
            return
        if self._cache.groups.is_plain:
            self._take_run(sequence)
        else:
            self._take_groups(sequence)

    def _take_run(self, sequence: Sequence) -> None:
        at, most = sequence.num_committed_blocks, self._tables.most_cached(sequence)
        found = self._cache.match_run(0, sequence.keys, sequence.token_ids, at, most)
        own = sequence.block_table[at : at + len(found)]
        sequence.block_table[at : at + len(found)] = found
        self._tables.releases.release(own)
        self._book(sequence, at + len(found))

    def _take_groups(self, sequence: Sequence) -> None:
        """Groups that slide give back the window where it was before, the others keep what they have reserved.

        The hit may be no deeper than what it has: a window is missing, or was evicted by another thread just now.
        """
        keys = sequence.keys[: self._tables.most_cached(sequence)]
        held = self._cache.match_groups(keys, sequence.token_ids)
        depth, own, tables = held[0].end, [], []
        if depth <= sequence.num_committed_blocks:
            self._cache.release([block_id for blocks in reversed(held) for block_id in blocks.block_ids])
            return
        for table, first, blocks in zip(sequence.tables, sequence.num_released, held, strict=True):
            own += table[first:depth]
            tables.append([RELEASED] * blocks.first + [*blocks.block_ids, *table[depth:]])
        sequence.block_table, *sequence.other_tables = tables
        sequence.num_released = [blocks.first for blocks in held]
        self._tables.releases.release(own)
        self._book(sequence, depth)

    def _book(self, sequence: Sequence, num_blocks: int) -> None:
        if num_blocks > sequence.num_committed_blocks:  # else a part of the next one, which it has computed, is its own
            num_computed = sequence.num_computed_tokens
            self._tables.go_on_behind(sequence, num_blocks)
            sequence.num_cached_tokens += sequence.num_computed_tokens - num_computed
