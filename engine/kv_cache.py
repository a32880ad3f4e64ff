"""The KV cache's books, shared by the scheduler (device thread) and by transfers (asyncio thread).

One lock, held for microseconds, around a `BlockPool`; plus the key chain's root and what /metrics wants to know.
"""

import secrets
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvstore.block_pool import BlockPool
from kvstore.events import CacheEvent
from kvstore.hashing import block_keys
from kvstore.kv_groups import HeldBlocks, KvGroups
from pagewire.kv_journal import Batch, Block, KvJournal

_PIECE = 256
"""Blocks that are matched or released under the lock at a time: 0.13 ms for 256 of 8192 on a busy machine."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Blocks now; tokens asked for and found in the prefix cache, and evicted blocks, since the start."""

    num_blocks: int
    num_free: int
    num_cached: int
    num_referenced: int
    num_query_tokens: int
    num_hit_tokens: int
    num_evictions: int


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """Where a block's content is now. It is still there as long as `generation` is the same."""

    block_id: int
    generation: int
    block: Block


class KvCache:
    """Thread-safe; see `BlockPool` for what each operation promises and asks of its callers."""

    def __init__(self, pool: BlockPool, root: bytes, block_size: int, groups: KvGroups | None = None) -> None:
        """`groups` of the model's layers; None: one that keeps everything."""
        self.root = root
        self.block_size = block_size
        self.groups = KvGroups(block_size=block_size) if groups is None else groups
        self.capacity = self.groups.capacity(pool.num_blocks)
        """The pool's size in blocks of a prompt; the number of its blocks if there is one KV group."""
        self._pool = pool
        self._lock = threading.Lock()
        self._journal = KvJournal(first_seq=1 + secrets.randbits(48))
        self.num_restored = 0
        """How often a block of a chain that group 0 had was brought back since the start. Only then hits grow where
        groups slide, other than by the next block of group 0."""
        self._num_query_tokens = 0
        self._num_hit_tokens = 0
        self._followers: list[Callable[[bytes, int, bool], None]] = []
        self.evicted: Callable[[], None] | None = None
        """Called when something was evicted, on whatever thread needed the room; it must be quick."""

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def free_capacity(self) -> int:
        """What is free, in the units of `capacity`."""
        return self.num_free if self.groups.is_plain else self.num_free * self.capacity // self.num_blocks

    def share_of_capacity(self, num_blocks: int) -> int:
        """What so many blocks of the pool take, in the units of `capacity`: 0 only if there are none."""
        return num_blocks if self.groups.is_plain else -(-num_blocks * self.capacity // self.num_blocks)

    @property
    def enable_caching(self) -> bool:
        return self._pool.enable_caching

    @property
    def num_free(self) -> int:
        with self._lock:
            return self._pool.num_free

    @property
    def num_releases(self) -> int:
        """How often a block has become free since the start."""
        with self._lock:
            return self._pool.num_releases

    @property
    def num_cached(self) -> int:
        with self._lock:
            return self._pool.num_cached

    @property
    def num_referenced(self) -> int:
        with self._lock:
            return self._pool.num_referenced

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def keys_for(
        self,
        token_ids: Sequence[int],
        cache_salt: str = "",
        parent: bytes | None = None,
        *,
        adapter: bytes = b"",
    ) -> list[bytes]:
        """Keys of the full blocks of `token_ids`; `parent` continues the chain of that key."""
        return block_keys(
            self.root,
            token_ids,
            self.block_size,
            cache_salt=cache_salt,
            adapter=adapter,
            parent=parent,
        )

    def match(self, keys: Sequence[bytes], token_ids: Sequence[int]) -> list[int]:
        """Blocks of the longest cached prefix, references taken."""
        return self.match_run(0, keys, token_ids, 0)

    def match_run(
        self, group: int, keys: Sequence[bytes], token_ids: Sequence[int], first: int, end: int | None = None
    ) -> list[int]:
        """Blocks of the longest cached run of a chain in one group, from number `first` on, references taken.

        `keys` and `token_ids` are those of the whole chain; no further than block `end`. Long ones go piece by piece,
        so that the other thread waits for microseconds: what is matched can't be evicted.
        """
        end = len(keys) if end is None else min(end, len(keys))
        block_ids: list[int] = []
        for start in range(first, end, _PIECE):
            piece = keys[start : min(start + _PIECE, end)]
            tokens = tuple(token_ids[start * self.block_size : (start + len(piece)) * self.block_size])
            with self._lock:
                found = self._pool.match(piece, tokens, self.block_size, group)
            block_ids += found
            if len(found) < len(piece):
                break
        return block_ids

    def match_groups(self, keys: Sequence[bytes], token_ids: Sequence[int]) -> list[HeldBlocks]:
        """The longest cached prefix that a sequence can go on from: what it holds then, by group. References are taken.

        A group that sees everything has to have all of it, one that slides the blocks that the next token sees.
        """
        if self.groups.is_plain:
            return [HeldBlocks(0, tuple(self.match(keys, token_ids)))]
        depth = self.hit_depth(keys)
        while depth:
            held = [
                HeldBlocks(first, tuple(self.match_run(group, keys, token_ids, first, depth)))
                for group, first in enumerate(self.groups.first_blocks(depth * self.block_size))
            ]
            if all(blocks.end == depth for blocks in held):
                self._touch(keys[: held[0].first])
                return held
            # Another thread has taken one of them since, or the tokens are others.
            for blocks in held:
                self.release(blocks.block_ids)
            depth = self._servable(keys, min(blocks.end for blocks in held))
        return [HeldBlocks() for _ in self.groups.groups]

    def hit_depth(self, keys: Sequence[bytes]) -> int:
        """Blocks of the longest cached prefix that a sequence can go on from now. Nothing is held for it."""
        return self._servable(keys, self.num_cached_keys(keys))

    def num_cached_keys(self, keys: Sequence[bytes]) -> int:
        """Blocks of a chain that group 0 has, which is prefix-closed; what the index says."""
        return bisect_left(range(len(keys)), True, key=lambda i: not self.is_cached(keys[i]))

    def _servable(self, keys: Sequence[bytes], depth: int) -> int:
        """The deepest hit, up to `depth`, whose end every sliding group has."""

        def first_missing(group: int, first: int, end: int) -> int | None:
            with self._lock:
                return next((i for i in range(first, end) if not self._pool.is_cached(keys[i], group)), None)

        return self.groups.deepest_whole(depth, first_missing)

    def renew(self, keys: Sequence[bytes]) -> None:
        """Somebody is about to want this prefix: what is cached of it is evicted after all that is free now."""
        depth = self.hit_depth(keys)
        firsts = self.groups.first_blocks(depth * self.block_size)
        for group, first in enumerate(firsts):
            # Held for that moment: between two pieces another thread may evict, and that must not be the beginning.
            self.release(*self._hold(keys[first:depth], group))
        self._touch(keys[: firsts[0]])

    def _hold(self, keys: Sequence[bytes], group: int) -> tuple[list[int], set[int]]:
        """Takes references on the leading ones that are cached, as `match`, whatever their tokens are.

        Also those that were free.
        """
        block_ids: list[int] = []
        borrowed: set[int] = set()
        for start in range(0, len(keys), _PIECE):
            piece = keys[start : start + _PIECE]
            with self._lock:
                found = [self._pool.find(key, group) for key in piece]
                leading = [each for each in takewhile(lambda each: each is not None, found) if each is not None]
                borrowed |= self._pool.free_among(leading)
                self._pool.acquire(leading)
            block_ids += leading
            if len(leading) < len(piece):
                break
        return block_ids, borrowed

    def _touch(self, keys: Sequence[bytes]) -> None:
        """The beginning of a chain of group 0, in use though nobody holds it: evicted before its end, it would take
        that along."""
        for end in range(len(keys), 0, -_PIECE):
            with self._lock:
                self._pool.touch(keys[max(0, end - _PIECE) : end])

    def is_cached(self, key: bytes, group: int = 0) -> bool:
        with self._lock:
            return self._pool.is_cached(key, group)

    def record_query(self, num_query_tokens: int, num_hit_tokens: int) -> None:
        """Counts one request's look-up for the statistics (a look-up may be repeated before it is used)."""
        with self._lock:
            self._num_query_tokens += num_query_tokens
            self._num_hit_tokens += num_hit_tokens

    def allocate(self, num_blocks: int) -> list[int] | None:
        with self._lock:
            num_before = self._pool.num_evictions
            block_ids = self._pool.allocate(num_blocks)
            has_evicted = self._pool.num_evictions > num_before
        if has_evicted and self.evicted is not None:
            self.evicted()
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        with self._lock:
            self._pool.acquire(block_ids)

    def release(self, block_ids: Sequence[int], borrowed: Collection[int] = ()) -> int:
        """As the pool's, piece by piece as `match`, from the tail, where eviction begins too."""
        num_freed = 0
        for end in range(len(block_ids), 0, -_PIECE):
            with self._lock:
                num_freed += self._pool.release(block_ids[max(0, end - _PIECE) : end], borrowed)
        return num_freed

    def commit(
        self,
        block_id: int,
        key: bytes,
        token_ids: Sequence[int],
        parent: bytes | None = None,
        cache_salt: str = "",
        adapter: str = "",
        *,
        group: int = 0,
        is_received: bool = False,
        is_restored: bool = False,
    ) -> int:
        """Makes a full block findable; returns the block to use from now on, which may be another one.

        `parent` is the key of the block before it: those who follow the journal build chains of them; salt and
        adapter's name are for them too. `is_received`: another worker had it; `is_restored`: a tier.
        """
        token_ids = tuple(token_ids)
        with self._lock:
            was_cached = self._pool.is_cached(key, group)
            block_id = self._pool.commit(block_id, key, token_ids, group, parent)
            is_new = not was_cached and self._pool.is_cached(key, group)
            if is_new and group == 0:
                self._journal.note(Block(key, parent, token_ids, cache_salt, adapter))
            elif group == 0 or is_received or is_restored:  # computing commits in all groups, these what they bring
                self.num_restored += 1
        if is_new:
            for follower in self._followers:
                follower(key, group, is_received)
        return block_id

    def follow(self, follower: Callable[[bytes, int, bool], None]) -> None:
        """`follower(key, group, is_received)` hears of each block that becomes cached, on whatever thread commits it.

        It must be quick.
        """
        self._followers.append(follower)

    def take(self, key: bytes, group: int, token_ids: Sequence[int]) -> int | None:
        """One cached block with one more reference; None if it isn't here, or is of other tokens."""
        with self._lock:
            found = self._pool.match([key], token_ids, len(token_ids), group)
        return found[0] if found else None

    def locate(self, key: bytes, group: int = 0) -> CachedBlock | None:
        """Where a cached block is, for those who copy it without holding it. The journal knows it as group 0's; without
        that one it would be of no use."""
        with self._lock:
            block_id, block = self._pool.find(key, group), self._journal.find(key)
            if block_id is None or block is None:
                return None
            return CachedBlock(block_id, self._pool.generation(block_id), block)

    def ref_count(self, block_id: int) -> int:
        with self._lock:
            return self._pool.ref_count(block_id)

    def is_read_by_others(self, block_id: int, num_own: int) -> bool:
        """Whether others than the owner of `num_own` references have it, or may find it: then nobody writes to it."""
        with self._lock:
            return self._pool.ref_count(block_id) > num_own or self._pool.is_committed(block_id)

    def generation(self, block_id: int) -> int:
        with self._lock:
            return self._pool.generation(block_id)

    def cached_keys(self) -> list[bytes]:
        with self._lock:
            return self._pool.cached_keys()

    def take_events(self) -> list[CacheEvent]:
        """What changed since the last call; the caller publishes it."""
        with self._lock:
            return self._take_events()

    def snapshot(self) -> list[bytes]:
        """All cached keys; pending events are dropped in the same moment, since the snapshot contains them."""
        with self._lock:
            self._take_events()
            return self._pool.cached_keys()

    def journal_since(self, seq: int) -> list[Batch]:
        """What changed after that batch of the journal; raises JournalGap."""
        with self._lock:
            return self._journal.since(seq)

    def journal_snapshot(self) -> tuple[int, list[Block]]:
        """The number of the journal's last batch and every cached block after it, parents before children."""
        with self._lock:
            return self._journal.snapshot()

    def reset(self) -> int:
        """Forgets what nobody references; returns how many blocks."""
        with self._lock:
            return self._pool.reset()

    def forget(self, starts_at: Callable[[Block], bool]) -> int:
        """Forgets blocks for which that holds and all that continue them, unless somebody references them.

        Returns how many. For operators: it looks at every block, under the lock (5 ms for 8192).
        """
        with self._lock:
            return self._pool.forget(self._journal.tails(starts_at))

    def stats(self) -> CacheStats:
        with self._lock:
            return CacheStats(
                num_blocks=self._pool.num_blocks,
                num_free=self._pool.num_free,
                num_cached=self._pool.num_cached,
                num_referenced=self._pool.num_referenced,
                num_query_tokens=self._num_query_tokens,
                num_hit_tokens=self._num_hit_tokens,
                num_evictions=self._pool.num_evictions,
            )

    def check_integrity(self) -> None:
        with self._lock:
            self._pool.check_integrity()

    def _take_events(self) -> list[CacheEvent]:
        events = self._pool.take_events()
        self._journal.append(events)
        return events
