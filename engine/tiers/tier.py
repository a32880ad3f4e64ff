"""One tier: a book of what lies where (`kvstore.tier_book`), slots of bytes, and a lock around the book.

The lock is held for microseconds; bytes are read and written outside it, by whoever has the entry.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.events import CacheEvent
from kvstore.eviction_order import CostOf
from kvstore.tier_block import Entry, Owned, TierBlock
from kvstore.tier_book import TierBook

TierName = Literal["host", "disk"]
Bytes = NDArray[np.uint8]


class Slots(Protocol):
    """Where a tier's bytes lie. Any method may raise OSError. One thread writes, several may read other slots."""

    @property
    def num_slots(self) -> int: ...

    def write(self, entry: Entry, source: Bytes) -> int:
        """Copies a block into the entry's slot; returns the copy's checksum. Not to be found after a crash."""
        ...

    def seal(self, entry: Entry, checksum: int) -> None:
        """What was written is whole: from now on it survives what the tier survives."""
        ...

    def read(self, entry: Entry, target: Bytes) -> None:
        """Copies the slot into `target`, whose checksum the caller compares."""
        ...

    def erase(self, is_live: Callable[[bytes], bool]) -> None:
        """Whatever is not live any more, also what was evicted, must not be found again by a later process."""
        ...

    def close(self) -> None: ...


class Tier:
    """Thread-safe; see `TierBook` for what each operation promises."""

    def __init__(self, name: TierName, slots: Slots, book: TierBook | None = None) -> None:
        self.name = name
        self.slots = slots
        self._book = TierBook(slots.num_slots) if book is None else book
        self._chain = self._book.chain
        self._lock = threading.Lock()

    def price(self, cost_of: CostOf) -> None:
        """What its blocks are worth from now on; called with this tier's lock held."""
        self._book.price(cost_of)

    @property
    def num_slots(self) -> int:
        return self._book.num_slots

    @property
    def num_ready(self) -> int:
        """Blocks that can be read."""
        return self._book.num_ready

    @property
    def num_evictions(self) -> int:
        return self._book.num_evictions

    def holds(self, key: bytes) -> bool:
        with self._lock:
            return self._book.holds(key)

    def children(self, key: bytes) -> frozenset[bytes]:
        """The blocks of KV group 0 here that continue that one."""
        with self._lock:
            return self._book.children(self._chain.name(key, self._chain.num_full - 1))

    def ready_keys(self) -> list[bytes]:
        with self._lock:
            return self._book.ready_keys()

    def begin_store(self, block: TierBlock, now: float) -> Entry | None:
        with self._lock:
            return self._book.begin_store(block, now)

    def finish_store(self, entry: Entry, checksum: int) -> bool:
        with self._lock:
            return self._book.finish_store(entry, checksum)

    def cancel_store(self, entry: Entry) -> None:
        with self._lock:
            self._book.cancel_store(entry)

    def cannot_grow(self, entry: Entry) -> None:
        """As `cancel_store`, since there is no room for its slot; the tier goes on with those that it has used."""
        with self._lock:
            self._book.cancel_store(entry)
            self._book.shrink(entry.slot)

    def take(self, name: bytes, token_ids: Sequence[int]) -> Entry | None:
        """One block of these tokens with one more reader; it was of use."""
        with self._lock:
            found = self._book.match([name], token_ids, len(token_ids))
        return found[0] if found else None

    def read(self, key: bytes) -> Entry | None:
        with self._lock:
            return self._book.read(key)

    def release(self, entries: Sequence[Entry]) -> None:
        with self._lock:
            self._book.release(entries)

    def touch(self, keys: Sequence[bytes]) -> list[bytes]:
        """As the book's; returns those that are not here."""
        with self._lock:
            self._book.touch(keys)
            return [key for key in keys if not self._book.holds(key)]

    def pin(self, keys: Sequence[bytes], until: float) -> int:
        """As the book's: the leading blocks of the chain of these keys, with what a hit behind them needs of every KV
        group, but never more than half of the slots in all. Returns how many leading blocks."""
        with self._lock:
            spare = self._book.num_slots // 2 - self._book.num_pinned(time.monotonic())
            depth = self._depth(keys[: self._chain.groups.deepest_hit(max(0, spare), len(keys))])
            self._book.pin(self._chain.names(keys, self._chain.of_hit(depth)), until)
            return depth

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Every KV group's."""
        groups = range(len(self._chain.groups))
        with self._lock:
            self._book.unpin([self._chain.name(key, group) for key in keys for group in groups])

    def depth(self, keys: Sequence[bytes]) -> int:
        """Leading blocks of the chain behind which a sequence could go on with what can be read here."""
        with self._lock:
            return self._depth(keys)

    def _depth(self, keys: Sequence[bytes]) -> int:
        def is_there(number: int, group: int) -> bool:
            return self._book.holds(self._chain.name(keys[number], group))

        full = self._chain.full
        num_whole = next((i for i in range(len(keys)) if not all(is_there(i, group) for group in full)), len(keys))
        return self._chain.deepest(num_whole, is_there)

    def forget(self, key: bytes) -> list[Entry]:
        with self._lock:
            return self._book.forget(key)

    def clear(self, owned: Owned | None = None) -> list[Entry]:
        with self._lock:
            return self._book.clear(owned)

    def take_events(self) -> list[CacheEvent]:
        with self._lock:
            return self._book.take_events(self.name)

    def snapshot(self) -> list[bytes]:
        """All keys that can be read; pending events are dropped in the same moment, since this contains them."""
        with self._lock:
            self._book.take_events()
            return self._book.ready_keys()

    def check_integrity(self, *, is_quiet: bool = False) -> None:
        """Raises AssertionError when the books disagree or, when nobody works on the tier, somebody has a slot."""
        with self._lock:
            self._book.check_integrity()
            if is_quiet and self._book.num_busy:
                raise AssertionError(f"{self._book.num_busy} slots of tier {self.name} are held by nobody")
