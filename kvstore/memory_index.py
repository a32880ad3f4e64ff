"""The prefix index in this process: what routers look up in, and the reference that other backends must equal."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import repeat
from operator import or_
from types import MappingProxyType

from kvstore.events import CacheEvent
from kvstore.index import IndexState
from kvstore.known_depths import Groups, KnownDepths, Range
from kvstore.redis_keys import INDEX_KEY_BYTES, index_keys
from kvstore.registry import WorkerRecord


class MemoryIndex:
    """key -> bit set of holders, and worker -> set of keys.

    Each worker owns a bit. What a worker holds of a prompt is prefix-closed, so the holders only grow fewer along its
    keys; a lookup bisects for all workers together and splits them where they differ:

        key      k0   k1   k2   k3          k2 splits abc into ab (deeper) and c; k3 splits ab; k1 says where c ends
        holders  abc  abc  ab   a     ->    depths c 2, b 3, a 4

    So it takes log2(keys) dictionary lookups for each *different* depth, and one if nobody has anything: dictionary
    lookups are what costs (each is a few cache misses once the index is large), not workers. Where many depths differ,
    the next lookup begins with where the last one ended (`kvstore/known_depths.py`). While a large snapshot is arriving
    a depth may be too small, never too large: whoever has a key had all that come before it.

    Clearing a worker gives it a fresh bit and leaves the old one in the table, where no lookup asks for it; later
    changes sweep it up piece by piece. (65536 blocks at once would stop the event loop for 50 ms and more.)
    """

    def __init__(self) -> None:
        self._records: dict[str, WorkerRecord] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._nothing: dict[str, int] = {}  # a depth of 0 for everybody: a copy costs less than making it
        self._owned = 0  # all bits that have an owner
        self._num_owners = 0  # so far; grows whenever a bit gets another one
        self._known = KnownDepths()
        self._blocks: dict[str, set[bytes]] = {}
        self._holders: dict[bytes, int] = {}
        self._garbage: deque[tuple[int, set[bytes]]] = deque()  # bits that nobody owns, and the keys that have them

    # --- the view ---

    @property
    def state(self) -> IndexState:
        return "connected"

    @property
    def num_blocks(self) -> int:
        return sum(len(blocks) for blocks in self._blocks.values())

    @property
    def has_any(self) -> bool:
        """Somebody holds something."""
        return any(self._blocks.values())

    def workers(self) -> Mapping[str, WorkerRecord]:
        return MappingProxyType(self._records)

    def blocks(self, worker_id: str) -> frozenset[bytes]:
        """The index keys that the worker holds; empty if it is unknown."""
        return frozenset(self._blocks.get(worker_id, ()))

    def lookup(self, keys: Sequence[bytes], worker_ids: Sequence[str] | None = None) -> dict[str, int]:
        if worker_ids is None:
            nothing, wanted = self._nothing.copy(), self._owned
        else:
            nothing = dict.fromkeys(worker_ids, 0)
            wanted = reduce(or_, map(self._bits.get, nothing, repeat(0)), 0)
        if not keys or not wanted:
            return nothing
        if len(keys[0]) != INDEX_KEY_BYTES:
            keys = index_keys(keys)
        first = self._holders.get(keys[0], 0) & wanted
        if not first:
            return nothing
        # By value, as the caller's list may change; with who holds the first key, which the known places may not cover.
        asked = (self._num_owners, first, tuple(nothing))
        groups: Groups = []
        ranges = [(1, len(keys), first)]
        known = self._known.find(keys)
        masks = known.look(self._holders, keys) if known is not None else ()
        if known is not None and masks:
            if (answer := known.answer(masks, len(keys), asked)) is not None:
                return answer
            groups, ranges = known.narrow(masks, len(keys), first)
        num_certain, is_certain = len(groups), not ranges
        self._search(keys, ranges, groups)
        if wanted != first:
            groups.append((0, wanted ^ first))
        depths = self._depths(nothing, groups)
        if wanted.bit_count() != len(depths):
            depths |= dict.fromkeys(depths.keys() - self._bits.keys(), 0)
        if known is not None and is_certain:
            known.keep(masks, len(keys), asked, depths)
        else:
            self._known.learn(keys, groups, num_certain)
        return depths

    def lookup_lower(
        self, keys: Sequence[bytes], worker_ids: Sequence[str] | None = None
    ) -> Mapping[str, dict[str, int]]:
        return {}  # one tier is all that it knows

    def _search(self, keys: Sequence[bytes], ranges: list[Range], groups: Groups) -> None:
        """Bisects until each range is one depth, and appends those."""
        holders = self._holders
        while ranges:
            low, high, bits = ranges.pop()
            while low < high:
                middle = (low + high + 1) >> 1
                deeper = holders.get(keys[middle - 1], 0) & bits
                if deeper == bits:
                    low = middle
                elif not deeper:
                    high = middle - 1
                else:
                    ranges.append((low, middle - 1, bits ^ deeper))
                    low, bits = middle, deeper
            groups.append((low, bits))

    def _depths(self, nothing: dict[str, int], groups: Groups) -> dict[str, int]:
        """By worker id, in the order of `nothing`; the largest group costs nothing."""
        sizes = [bits.bit_count() for _, bits in groups]
        usual = sizes.index(max(sizes))
        depths = dict.fromkeys(nothing, groups[usual][0]) if groups[usual][0] else nothing
        for number, (depth, bits) in enumerate(groups):
            if number == usual:
                continue
            name = self._names.get(bits)
            if name is not None:
                depths[name] = depth
                continue
            while bits:
                bit = bits & -bits
                depths[self._names[bit]] = depth
                bits ^= bit
        return depths

    def forget_chains(self) -> None:
        """Lookups begin anew, without what the last ones found; nothing else changes."""
        self._known = KnownDepths()

    async def start(self) -> None:
        """Nothing to follow."""

    async def stop(self) -> None:
        """Nothing was begun."""

    async def quiesce(self, timeout: float = 10.0) -> None:
        """Changes are visible when the call that made them returns."""

    # --- changes ---

    def register(self, record: WorkerRecord, blocks: Iterable[bytes] = ()) -> None:
        """Adds or replaces a worker, with exactly these 16-byte keys."""
        worker_id = record.worker_id
        if worker_id in self._records:
            self.clear(worker_id)
        else:
            self._blocks[worker_id] = set()
            self._nothing[worker_id] = 0
            self._give_bit(worker_id)
        self._records[worker_id] = record
        self.store(worker_id, blocks)

    def unregister(self, worker_id: str) -> None:
        """Forgets a worker and all it holds. Idempotent."""
        if worker_id in self._records:
            self.clear(worker_id)
            bit = self._bits.pop(worker_id)
            del self._names[bit]
            self._owned ^= bit
            del self._nothing[worker_id]
            del self._blocks[worker_id]
            del self._records[worker_id]

    def store(self, worker_id: str, keys: Iterable[bytes]) -> None:
        """The worker now holds these 16-byte keys too."""
        bit, blocks, holders = self._bits[worker_id], self._blocks[worker_id], self._holders
        num_before = len(blocks)
        for key in keys:  # one look into each table where nobody else has the key
            blocks.add(key)
            others = holders.setdefault(key, bit)
            if not others & bit:
                holders[key] = others | bit
        if self._garbage:
            self._sweep(len(blocks) - num_before)

    def remove(self, worker_id: str, keys: Iterable[bytes]) -> None:
        """The worker no longer holds these 16-byte keys."""
        bit, blocks, holders = self._bits[worker_id], self._blocks[worker_id], self._holders
        num_before = len(blocks)
        for key in keys:
            try:
                blocks.remove(key)
            except KeyError:
                continue
            if others := holders.pop(key) & ~bit:
                holders[key] = others
        if self._garbage:
            self._sweep(num_before - len(blocks))

    def clear(self, worker_id: str) -> None:
        """The worker holds nothing any more. Takes no longer for many blocks than for few."""
        blocks = self._blocks[worker_id]
        if blocks:
            self._blocks[worker_id] = set()
            bit = self._bits[worker_id]
            del self._names[bit]
            self._owned ^= bit
            self._garbage.append((bit, blocks))
            self._give_bit(worker_id)
        self._sweep(0)

    def _give_bit(self, worker_id: str) -> None:
        taken = self._names.keys() | {bit for bit, _ in self._garbage}
        bit = 1
        while bit in taken:
            bit <<= 1
        self._bits[worker_id] = bit
        self._names[bit] = worker_id
        self._owned |= bit
        self._num_owners += 1

    def _sweep(self, num_changed: int) -> None:
        """Twice as many keys as were changed, and some: garbage never grows for long."""
        budget = 256 + 2 * num_changed
        while self._garbage and budget > 0:
            bit, blocks = self._garbage[0]
            for _ in range(min(budget, len(blocks))):
                self._drop(blocks.pop(), bit)
                budget -= 1
            if not blocks:
                self._garbage.popleft()

    def _drop(self, key: bytes, bit: int) -> None:
        rest = self._holders[key] & ~bit
        if rest:
            self._holders[key] = rest
        else:
            del self._holders[key]

    def check_integrity(self) -> None:
        """AssertionError if the two directions disagree."""
        expected: dict[bytes, int] = {}
        owned = [(self._bits[worker_id], blocks) for worker_id, blocks in self._blocks.items()]
        for bit, blocks in (*owned, *self._garbage):
            for key in blocks:
                expected[key] = expected.get(key, 0) | bit
        assert self._holders == expected, "holders and the workers' sets disagree"
        assert self._bits.keys() == self._records.keys() == self._blocks.keys(), "workers differ between tables"
        assert self._nothing == dict.fromkeys(self._bits, 0), "not everybody begins at 0"
        assert {name: bit for bit, name in self._names.items()} == self._bits, "a bit has two owners"
        assert self._owned == sum(self._names), "not every owned bit is asked for"


class MemoryPublisher:
    """Publishes the device's blocks into a `MemoryIndex` of the same process: no server, no delay."""

    def __init__(self, index: MemoryIndex, record: WorkerRecord, snapshot: Callable[[], list[bytes]]) -> None:
        self._index = index
        self._record = record
        self._snapshot = snapshot

    async def start(self) -> None:
        self._index.register(self._record, index_keys(self._snapshot()))

    def publish(self, events: Sequence[CacheEvent]) -> None:
        worker_id = self._record.worker_id
        for event in events:
            if event.tier != "device":
                continue
            if event.kind == "cleared":
                self._index.clear(worker_id)
            elif event.kind == "removed":
                self._index.remove(worker_id, index_keys(event.keys))
            else:
                self._index.store(worker_id, index_keys(event.keys))

    async def quiesce(self, timeout: float = 10.0) -> None:
        """Everything taken is published."""

    async def stop(self) -> None:
        self._index.unregister(self._record.worker_id)
