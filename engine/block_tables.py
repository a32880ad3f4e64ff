"""Which blocks a sequence's tokens lie in: cached prefix, growth, copy-on-write, commit, fork. No policy.

A sequence has a table for each KV group. Before it takes blocks for its next tokens, the groups that slide give back
what lies outside the window of these and all later ones (`kvstore.kv_groups`).
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import zip_longest

from engine.kv_cache import KvCache
from engine.late_releases import LateReleases
from engine.request import AdoptedKv
from engine.sequence import Attempt, Sequence
from kvstore.kv_groups import RELEASED, HeldBlocks


class BlockTables:
    """Changes sequences' block tables and keeps the cache's references in step with them."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._groups = cache.groups
        self._is_plain, self._slides = cache.groups.is_plain, cache.groups.slides  # asked at each token
        self._block_size = cache.block_size
        self._copy_sources: list[int] = []
        self.releases = LateReleases(cache)

    def extend_keys(self, sequence: Sequence) -> None:
        """Keys for all full blocks of the tokens known."""
        done = len(sequence.keys)
        if sequence.num_tokens // self._block_size > done:
            sequence.keys += self._cache.keys_for(
                sequence.token_ids[done * self._block_size :],
                sequence.request.cache_salt,
                sequence.keys[-1] if done else None,
                adapter=sequence.request.adapter_key,
            )

    def match(self, sequence: Sequence) -> None:
        """Starts the table of a sequence without blocks with what is cached of it."""
        self.extend_keys(sequence)
        most = self.most_cached(sequence)
        self._put(sequence, self._cache.match_groups(sequence.keys[:most], sequence.token_ids))
        self.go_on_behind(sequence, len(sequence.block_table))
        sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.loaded_tokens = ()

    def go_on_behind(self, sequence: Sequence, num_blocks: int) -> None:
        """Its first blocks, so many, are cached ones: it goes on with the token behind them, its last one at most.

        That one is computed in any case, since the next one is sampled from its forward. If its block is a cached one,
        that is copied first, as any that others read.
        """
        sequence.num_computed_tokens = min(num_blocks * self._block_size, sequence.num_tokens - 1)
        sequence.num_committed_blocks = sequence.num_computed_tokens // self._block_size

    def renew(self, sequence: Sequence) -> None:
        """It has come and has to wait: those before it evict other blocks than what the cache has of it."""
        self.extend_keys(sequence)
        self._cache.renew(sequence.keys[: self.most_cached(sequence)])

    def match_again(self, sequence: Sequence) -> None:
        """The same for one that has blocks, which it gives back: others have come into the cache meanwhile."""
        before = list(self._held(sequence))
        self.match(sequence)
        self.releases.release(before)

    def give_up(self, sequence: Sequence, num_releases: int, num_restored: int, promised: int) -> None:
        """Gives back what `match` has found and notes why; the numbers are the cache's before the look-up."""
        most, num_missing = self.most_cached(sequence), self.num_missing_on_the_way(sequence)
        depth = len(sequence.block_table)
        num_cached = depth if self._is_plain else self._cache.num_cached_keys(sequence.keys)
        next_key = sequence.keys[num_cached] if num_cached < most else None
        num_releases += self.free(sequence)
        sequence.attempt = Attempt(num_missing, depth, next_key, num_releases, num_restored, promised)

    def is_hopeless(self, sequence: Sequence, promised: int) -> bool:
        """True if another look-up cannot get the sequence admitted: a long one costs milliseconds, each step.

        The hit can grow only by its next block, and where groups slide also when others bring back a window. With the
        same hit it takes more free blocks: at least as many as it lacks and, if it lacked some last time, one that has
        become free since or is promised to fewer others.
        """
        last = sequence.attempt
        if last is None or (last.next_key is not None and self._cache.is_cached(last.next_key)):
            return False
        is_hopeless = (
            self._cache.num_releases == last.num_releases and promised >= last.promised
        ) or last.num_missing + promised > self._cache.num_free
        return is_hopeless and not (self._slides and self._has_grown(sequence, last))

    def adopt(self, sequence: Sequence, adopted: AdoptedKv, most: int) -> None:
        """Starts the tables with blocks that a transfer has filled, to be used up to `most` tokens."""
        self._put(sequence, (HeldBlocks(adopted.first_block, adopted.block_ids), *adopted.others))
        self.extend_keys(sequence)
        self.commit(sequence, min(adopted.num_tokens, most))

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks to allocate before the tokens up to `num_tokens` can be computed, copies on write included."""
        if self._is_plain:
            missing = max(0, self._cache.num_blocks_for(num_tokens) - len(sequence.block_table))
        else:
            missing = sum(max(0, lacking) for lacking in self._lacking(sequence, num_tokens))
        if sequence.load is not None:
            missing = max(0, missing - len(sequence.load.block_ids))
        if self._is_plain:
            return missing + self._is_read_by_others(sequence, sequence.block_table)
        return missing + sum(self._is_read_by_others(sequence, table) for table in sequence.tables)

    def num_missing_on_the_way(self, sequence: Sequence) -> int:
        """The most blocks that it has still to take before all its tokens are computed, chunk by chunk.

        A group that slides gives back blocks on the way, so it never lacks more than its window and a chunk take.
        """
        if self._is_plain:
            return self.num_missing(sequence, sequence.num_tokens)
        lengths = [len(table) for table, _ in zip_longest(sequence.tables, self._groups.groups, fillvalue=())]
        total = sum(self._is_read_by_others(sequence, table) for table in sequence.tables)
        for group, lacking in enumerate(self._lacking(sequence, sequence.num_tokens)):
            most = self._groups.most_held(group)
            if most is not None:
                held = lengths[group] - self._groups.first_block(group, self._position(sequence))
                lacking = min(lacking, most - held)
            total += max(0, lacking)
        return total if sequence.load is None else max(0, total - len(sequence.load.block_ids))

    def grow(self, sequence: Sequence, num_tokens: int, copies: list[tuple[int, int]]) -> bool:
        """Room for the tokens up to `num_tokens`; False when blocks run out, then it has none more than before.

        The block of the next token is copied first if others read it, or may find it; `copies` gets (source,
        destination), and the source stays referenced: in the same plan its last owner may be preempted, and a transfer
        take the block.
        """
        self._slide(sequence)
        if not self.num_missing(sequence, num_tokens):
            return True
        if not self._is_plain:
            self._put_empty(sequence)
        # Asked before: to allocate is to evict, and what continues an evicted block can no longer be found.
        are_shared = [self._is_read_by_others(sequence, table) for table in sequence.tables]
        lackings = [max(0, lacking) for lacking in self._lacking(sequence, num_tokens)]
        allocated = self._cache.allocate(sum(are_shared) + sum(lackings))
        if allocated is None:
            return False
        fresh, at = iter(allocated), sequence.num_computed_tokens // self._block_size
        for table, is_shared, lacking in zip(sequence.tables, are_shared, lackings, strict=True):
            if is_shared:
                shared, own = table[at], next(fresh)
                copies.append((shared, own))
                self._copy_sources.append(shared)  # with the sequence's reference
                table[at] = own
            table += [next(fresh) for _ in range(lacking)]
        return True

    def reserve(self, sequence: Sequence, copies: list[tuple[int, int]]) -> bool:
        """As `grow` for all tokens, but groups that slide take their blocks chunk by chunk."""
        if self._is_plain:
            return self.grow(sequence, sequence.num_tokens, copies)
        self._put_empty(sequence)
        lacking = self._lacking(sequence, sequence.num_tokens)
        full = [i for i, group in enumerate(self._groups.groups) if group.window is None and lacking[i] > 0]
        allocated = self._cache.allocate(sum(lacking[i] for i in full))
        if allocated is None:
            return False
        fresh, tables = iter(allocated), sequence.tables
        for i in full:
            tables[i].extend(next(fresh) for _ in range(lacking[i]))
        return True

    def commit(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Books that the KV up to `num_computed_tokens` is there; full blocks become findable and immutable."""
        sequence.num_computed_tokens = num_computed_tokens
        num_full = num_computed_tokens // self._block_size
        if num_full > len(sequence.keys):
            self.extend_keys(sequence)
        if num_full <= sequence.num_committed_blocks:
            return
        adapter = "" if sequence.request.adapter is None else sequence.request.adapter.name
        for i in range(sequence.num_committed_blocks, num_full):  # as tiers have them: by number, then by group
            tokens = sequence.token_ids[i * self._block_size : (i + 1) * self._block_size]
            parent = sequence.keys[i - 1] if i else None
            for group, table in enumerate(sequence.tables):
                if sequence.num_released and i < sequence.num_released[group]:
                    continue
                self.releases.release_with(table[i])  # it may be given up for a cached one with the same content
                table[i] = self._cache.commit(
                    table[i], sequence.keys[i], tokens, parent, sequence.request.cache_salt, adapter, group=group
                )
        sequence.num_committed_blocks = num_full

    def fork(self, trunk: Sequence, child: Sequence) -> None:
        """Lets `child`, whose tokens go on from the trunk's, share everything that `trunk` has computed."""
        child.num_computed_tokens = trunk.num_computed_tokens
        child.num_committed_blocks = trunk.num_committed_blocks
        num_blocks = self._cache.num_blocks_for(child.num_computed_tokens)
        child.block_table, *child.other_tables = (table[:num_blocks] for table in trunk.tables)
        child.num_released = list(trunk.num_released)
        child.keys = list(trunk.keys)
        child.num_cached_tokens = trunk.num_cached_tokens
        self._cache.acquire(self._held(child))

    def free(self, sequence: Sequence) -> int:
        """Gives all blocks back; the tokens have to be computed again or found in the cache. Returns how many got free.

        A block that is still to be copied stays referenced until `forget_copies`, those that a tier fills until it is
        done.
        """
        if sequence.load is not None:
            sequence.load.abandon()
            sequence.load = None
        num_freed = self.releases.release(self._held(sequence))
        sequence.block_table, sequence.other_tables, sequence.num_released = [], [], []
        sequence.num_computed_tokens = 0
        sequence.num_committed_blocks = 0
        sequence.attempt = None
        return num_freed

    def forget_copies(self) -> None:
        """The copies have been made, or never will be: their sources may go."""
        sources, self._copy_sources = self._copy_sources, []
        for source in sources:
            self.releases.release([source])

    def wanted_from(self, sequence: Sequence) -> tuple[int, ...]:
        """By group the first block that whoever takes the computed sequence over needs; empty: all from the first."""
        if not self._slides:
            return ()
        return self._groups.first_blocks(self._groups.restart(sequence.num_tokens))

    def _has_grown(self, sequence: Sequence, last: Attempt) -> bool:
        """Whether the hit is deeper now; asked only once after something was brought back."""
        num_restored = self._cache.num_restored
        if num_restored == last.num_restored:
            return False
        sequence.attempt = replace(last, num_restored=num_restored)
        return self._cache.hit_depth(sequence.keys[: self.most_cached(sequence)]) > last.depth

    def most_cached(self, sequence: Sequence) -> int:
        """Blocks that may come from the cache or a tier."""
        return 0 if sequence.wants_prompt_logprobs else self._groups.longest_hit(sequence.num_tokens)

    def _put(self, sequence: Sequence, held: Iterable[HeldBlocks]) -> None:
        """Starts its tables with these blocks, group by group."""
        groups = list(held)
        tables = [[RELEASED] * blocks.first + list(blocks.block_ids) for blocks in groups]
        sequence.block_table, *sequence.other_tables = tables
        sequence.num_released = [] if self._is_plain else [blocks.first for blocks in groups]

    def _put_empty(self, sequence: Sequence) -> None:
        """Gives it a table for each group if it has none."""
        if not sequence.num_released:
            self._put(sequence, [HeldBlocks() for _ in self._groups.groups])

    def _held(self, sequence: Sequence) -> Seq[int]:
        """All its blocks in the order that `release` wants: what is worth least comes last.

        The tails of the groups that keep everything, group 0's before the others': the index never says more than is
        there. Then those of the groups that slide, which are worth nothing without them.
        """
        if self._is_plain:
            return sequence.block_table
        kept: list[Seq[int]] = []
        sliding: list[Seq[int]] = []
        for group, table, first in zip(self._groups.groups, sequence.tables, sequence.num_released, strict=False):
            (kept if group.window is None else sliding).append(table[first:])
        return [*_interleaved(sliding), *_interleaved(kept)]

    def _lacking(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """For each group the blocks that its table lacks for the tokens up to `num_tokens`; may be negative."""
        num_blocks = self._cache.num_blocks_for(num_tokens)
        tables = zip_longest(sequence.tables, self._groups.groups, fillvalue=())
        return [num_blocks - len(table) for table, _ in tables]

    def _position(self, sequence: Sequence) -> int:
        """What lies outside this position's window is not needed any more.

        Of a sequence that is handed on, whoever takes it over may begin a little before its end.
        """
        position = sequence.num_computed_tokens
        return min(position, self._groups.restart(sequence.num_tokens)) if sequence.prefill_only else position

    def _slide(self, sequence: Sequence) -> None:
        """Groups with a window give back what no later token sees; it stays cached until somebody needs the block."""
        if not self._slides or not sequence.num_released:
            return
        position = self._position(sequence)
        for group, table in enumerate(sequence.tables):
            first, end = sequence.num_released[group], self._groups.first_block(group, position)
            if end > first:
                self.releases.release(table[first:end])
                table[first:end] = [RELEASED] * (end - first)
                sequence.num_released[group] = end

    def is_writing_to_shared(self, sequence: Sequence) -> bool:
        """Whether the block of its next token has another holder, be it a copy that a running step has yet to make."""
        return any(self._is_read_by_others(sequence, table) for table in sequence.tables)

    def _is_read_by_others(self, sequence: Sequence, table: Seq[int]) -> bool:
        at = sequence.num_computed_tokens // self._block_size
        if at >= len(table):
            return False
        return self._cache.is_read_by_others(table[at], 1 + self._copy_sources.count(table[at]))


def _interleaved(tables: Seq[Seq[int]]) -> Iterable[int]:
    """Block by block, the first table's behind the others'; they end alike, but may begin at different numbers."""
    longest = max(map(len, tables), default=0)
    for i in range(-longest, 0):
        yield from (table[i] for table in reversed(tables) if -i <= len(table))
