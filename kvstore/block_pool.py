"""Which block is used by whom and which content can be found again: reference counts, LRU free list, prefix cache.

A block is free when nobody references it, cached or not. The free list is in the order of eviction:

    [ blocks without content | cached blocks, least recently used first ]
      ^ allocate() takes from here, a cached block loses its key then

`release` puts a sequence's blocks back tail first, so tails go before heads. Together with `commit`, which exchanges
a duplicate for the block already cached, what the pool holds of a chain is always prefix-closed, as long as callers

    * commit a chain in order, each block while holding all blocks before it, and
    * hold and release whole prefixes: who references block i of a chain references blocks 0 … i-1 too.

With several KV groups (`kv_groups`) a block's content belongs to one of them; all groups share the blocks and the free
list. What is prefix-closed, and told to the index, is group 0. The others hold a chain's blocks here and there. Where
group 0 itself gives back the beginning of a chain (`closes_chains`), evicting a block forgets all that continue it.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.events import CacheEvent, EventKind, in_runs


class BlockPool:
    """`num_blocks` blocks, named 0 … num_blocks-1. Not thread-safe; no clock, no I/O.

    `generations[id]` grows by one whenever a block is handed out anew; a reader that copies a block without holding
    it compares the value before and after. The array may live in memory that peers can read.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_caching: bool = True,
        generations: npt.NDArray[np.uint64] | None = None,
        num_groups: int = 1,
        closes_chains: bool = False,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        if generations is not None and generations.shape != (num_blocks,):
            raise ValueError(f"generations must have shape ({num_blocks},), got {generations.shape}")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.generations = np.zeros(num_blocks, dtype=np.uint64) if generations is None else generations
        self.num_evictions = 0
        self.num_releases = 0
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((block_id, None) for block_id in range(num_blocks))
        # of each group: key -> the one block that has this content
        self._block_ids: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self._keys: list[bytes | None] = [None] * num_blocks
        self._groups = [0] * num_blocks
        self._children: dict[bytes, list[bytes]] | None = {} if closes_chains else None
        self._parents: dict[bytes, bytes] = {}
        self._token_ids: list[tuple[int, ...]] = [()] * num_blocks
        self._events: list[tuple[EventKind, bytes]] = []

    @property
    def num_free(self) -> int:
        """Blocks nobody references, cached or not."""
        return len(self._free)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by key, referenced or not."""
        return sum(map(len, self._block_ids))

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def is_committed(self, block_id: int) -> bool:
        """Whether it can be found by key."""
        return self._keys[block_id] is not None

    def generation(self, block_id: int) -> int:
        return int(self.generations[block_id])

    def is_cached(self, key: bytes, group: int = 0) -> bool:
        return key in self._block_ids[group]

    def find(self, key: bytes, group: int = 0) -> int | None:
        """The block that has this content."""
        return self._block_ids[group].get(key)

    def cached_keys(self) -> list[bytes]:
        """Those of group 0."""
        return list(self._block_ids[0])

    def allocate(self, num_blocks: int) -> list[int] | None:
        """`num_blocks` blocks with one reference each, or None (and no change) when fewer are free."""
        if num_blocks > len(self._free):
            return None
        block_ids = []
        for _ in range(num_blocks):
            block_id, _ = self._free.popitem(last=False)
            if self._keys[block_id] is not None:
                self._forget(block_id)
                self.num_evictions += 1
            self._ref_counts[block_id] = 1
            self.generations[block_id] += np.uint64(1)
            block_ids.append(block_id)
        return block_ids

    def match(self, keys: Sequence[bytes], token_ids: Sequence[int], block_size: int, group: int = 0) -> list[int]:
        """The blocks of the longest cached prefix of `keys`, a reference taken on each; token ids are compared too."""
        block_ids = []
        for i, key in enumerate(keys):
            block_id = self._block_ids[group].get(key)
            if block_id is None or self._token_ids[block_id] != tuple(token_ids[i * block_size : (i + 1) * block_size]):
                break
            block_ids.append(block_id)
        self.acquire(block_ids)
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """One more reference on each. A free block may be acquired only while it is cached, else it has no content."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                if self._keys[block_id] is None:
                    raise ValueError(f"block {block_id} is free and holds nothing; it cannot be acquired")
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def free_among(self, block_ids: Iterable[int]) -> set[int]:
        """Those that nobody references."""
        return {block_id for block_id in block_ids if not self._ref_counts[block_id]}

    def release(self, block_ids: Sequence[int], borrowed: Collection[int] = ()) -> int:
        """Gives up one reference on each of `block_ids`, which are in sequence order. Returns how many became free.

        `borrowed` ones were free when they were taken: that they are so again doesn't count.
        """
        num_releases = self.num_releases
        for block_id in reversed(block_ids):
            if self._ref_counts[block_id] <= 0:
                raise ValueError(f"block {block_id} is released but nobody references it")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                self.num_releases += block_id not in borrowed
                if self._keys[block_id] is None:
                    self._free.move_to_end(block_id, last=False)
        return self.num_releases - num_releases

    def touch(self, keys: Iterable[bytes], group: int = 0) -> None:
        """Blocks of a chain that are in use though nobody references them: they are evicted later, tails first."""
        for key in reversed(list(keys)):
            block_id = self._block_ids[group].get(key)
            if block_id is not None and block_id in self._free:
                self._free.move_to_end(block_id)

    def commit(
        self, block_id: int, key: bytes, token_ids: Sequence[int], group: int = 0, parent: bytes | None = None
    ) -> int:
        """Declares a referenced block full and immutable, to be found by `key`. Returns the block to use from now on.

        If another block already has this content, the caller's reference moves to that one and `block_id` is released:
        kept duplicates would leave a chain whose head is evicted while its tail is still cached. With `closes_chains`
        a block whose `parent` is not cached (any more) cannot be found either.
        """
        if self._ref_counts[block_id] <= 0:
            raise ValueError(f"block {block_id} is committed but nobody references it")
        if not self.enable_caching or self._keys[block_id] == key:
            return block_id
        if self._keys[block_id] is not None:
            raise ValueError(f"block {block_id} is committed under a second key")
        canonical = self._block_ids[group].get(key)
        if canonical is not None:
            self.acquire([canonical])
            self.release([block_id])
            return canonical
        if self._children is not None and group == 0 and parent is not None:
            if parent not in self._block_ids[0]:
                return block_id
            self._children.setdefault(parent, []).append(key)
            self._parents[key] = parent
        self._block_ids[group][key] = block_id
        self._keys[block_id] = key
        self._groups[block_id] = group
        self._token_ids[block_id] = tuple(token_ids)
        if group == 0:
            self._events.append(("stored", key))
        return block_id

    def reset(self) -> int:
        """Forgets the content of all free blocks; referenced ones stay (their chains stay whole). Returns how many."""
        num_forgotten = self._forget_all([block_id for block_id in self._free if self._keys[block_id] is not None])
        if not self._block_ids[0]:
            self._events = [("cleared", b"")]
        return num_forgotten

    def forget(self, keys: Iterable[bytes]) -> int:
        """The same for blocks of these keys, which are to be whole tails of chains."""
        found = (block_ids.get(key) for key in keys for block_ids in self._block_ids)
        return self._forget_all([each for each in found if each is not None and self._ref_counts[each] == 0])

    def _forget_all(self, block_ids: list[int]) -> int:
        for block_id in reversed(block_ids):
            self._free.move_to_end(block_id, last=False)
        for block_id in block_ids:
            if self._keys[block_id] is not None:  # else it was forgotten with the beginning of its chain
                self._forget(block_id)
        return len(block_ids)

    def take_events(self) -> list[CacheEvent]:
        """What changed since the last call, in order; runs of the same kind come as one event."""
        pending, self._events = self._events, []
        return in_runs(pending)

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not agree with each other."""
        free = {block_id for block_id, count in enumerate(self._ref_counts) if count == 0}
        _expect(all(count >= 0 for count in self._ref_counts), "a reference count is negative")
        _expect(free == set(self._free), "the free list is not the set of unreferenced blocks")
        keyed: tuple[dict[bytes, int], ...] = tuple({} for _ in self._block_ids)
        for block_id, key in enumerate(self._keys):
            if key is not None:
                keyed[self._groups[block_id]][key] = block_id
        _expect(keyed == self._block_ids, "keys and blocks do not agree")
        known = set(self._parents) | set(self._parents.values())
        _expect(known <= set(keyed[0]), "the beginning of a chain is gone and what continues it is not")
        _expect(self.enable_caching or not any(keyed), "something is cached although caching is off")
        cached_seen = False
        for block_id in self._free:
            cached_seen = cached_seen or self._keys[block_id] is not None
            _expect(not cached_seen or self._keys[block_id] is not None, "an empty block lies behind a cached one")

    def _forget(self, block_id: int) -> None:
        key, group = self._keys[block_id], self._groups[block_id]
        assert key is not None
        if self._children is not None and group == 0:
            self._forget_children(key)
        del self._block_ids[group][key]
        self._keys[block_id] = None
        self._token_ids[block_id] = ()
        if group == 0:
            self._events.append(("removed", key))

    def _forget_children(self, key: bytes) -> None:
        """All that continue it, tails first; free ones are the next to be taken."""
        assert self._children is not None
        chain = [key]
        for each in chain:
            chain += self._children.pop(each, ())
        parent = self._parents.pop(key, None)
        if parent is not None:
            self._children[parent].remove(key)
            if not self._children[parent]:
                del self._children[parent]
        for each in reversed(chain[1:]):
            block_id = self._block_ids[0].pop(each)
            del self._parents[each]
            self._keys[block_id] = None
            self._token_ids[block_id] = ()
            self._events.append(("removed", each))
            if block_id in self._free:
                self._free.move_to_end(block_id, last=False)


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
