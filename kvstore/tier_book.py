"""Which block lies in which slot of a tier below the device: states, references, chains, eviction.

    begin_store ──► WRITING ── finish_store ──► READY ── evicted, forgotten or cleared ──► slot free
                       └────── cancel_store ──► slot free

A block that is being written is never found. A block is stored only behind its parent, and only leaves are evicted, so
what a tier holds of a chain is prefix-closed. Whoever reads or writes a slot has it: a block that is forgotten
meanwhile is not found any more, but its slot is reused only when the last reader is done.

Which leaf goes `EvictionOrder` says: exactly those that may go are in it. What KV groups with a window have hangs on
the chain of the others (`TierChain`); one that no window needs any more goes first. Events are of group 0 alone.
"""

from collections.abc import Iterable, Sequence

from kvstore.events import CacheEvent, EventKind, Tier, in_runs
from kvstore.eviction_order import CostOf, EvictionOrder
from kvstore.pin_times import PinTimes
from kvstore.tier_block import Entry, Owned, TierBlock
from kvstore.tier_chain import TierChain
from kvstore.tier_windows import TierWindows


class TierBook:
    """`num_slots` slots, 0 … num_slots-1, of which `num_ready` have a block that can be read.

    Pure: not thread-safe, no I/O; `now` is in seconds of any one clock.
    """

    def __init__(self, num_slots: int, cost_of: CostOf = lambda entry: 1.0, chain: TierChain | None = None) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self.num_slots = num_slots
        self.num_evictions = 0
        self.num_ready = 0
        self._free = dict.fromkeys(range(num_slots - 1, -1, -1))
        self._entries: dict[bytes, Entry] = {}
        self._retired: list[int] = []
        self._leaving: dict[int, Entry] = {}  # forgotten, by slot; somebody still reads or writes there
        self.chain = TierChain() if chain is None else chain
        self._windows = TierWindows(self._entries, self.chain)
        self._order = EvictionOrder(cost_of, self._windows.is_torn)
        self._pins = PinTimes()
        self._events: list[tuple[EventKind, bytes]] = []

    @property
    def num_free(self) -> int:
        """Slots without a block that can be found or is being read or written."""
        return len(self._free)

    @property
    def num_busy(self) -> int:
        """Blocks that somebody reads or writes now."""
        return len(self._leaving) + sum(not e.is_ready or e.num_readers > 0 for e in self._entries.values())

    def holds(self, key: bytes) -> bool:
        """True if the block can be read."""
        entry = self._entries.get(key)
        return entry is not None and entry.is_ready

    def children(self, key: bytes) -> frozenset[bytes]:
        """The blocks of group 0 here that continue that one, also those that are being written."""
        entry = self._entries.get(key)
        children = () if entry is None else entry.children
        return frozenset(child for child in children if not self._entries[child].block.group)

    def ready_keys(self) -> list[bytes]:
        """Of group 0, parents before children."""
        return [key for key, entry in self._entries.items() if entry.is_ready and not entry.block.group]

    def price(self, cost_of: CostOf) -> None:
        """What blocks cost from now on."""
        self._order.price(cost_of)

    # --- storing, in two phases ---

    def begin_store(self, block: TierBlock, now: float) -> Entry | None:
        """A slot to write the block to; None if it is here, its parent is not, or every slot is needed."""
        parent = None if block.parent is None else self._entries.get(block.parent)
        if block.key in self._entries or (block.parent is not None and (parent is None or not parent.is_ready)):
            return None
        if parent is not None:
            self._adopt(parent, block)  # so that it is no leaf while room is made
            self._note(parent)
        self.num_pinned(now)  # ends pins
        if not self._free and not self._evict():
            if parent is not None:
                self._disown(parent, block)
                self._note(parent)
            return None
        entry = self._entries[block.key] = Entry(block, self._free.popitem()[0], _depth(block, parent))
        return entry

    def finish_store(self, entry: Entry, checksum: int) -> bool:
        """What was written is whole. False if the block was forgotten meanwhile."""
        if entry.is_gone:
            self._leave(entry)
            return False
        entry.checksum = checksum
        entry.is_ready = True
        self.num_ready += 1
        self._touch(entry)
        self._tell("stored", entry)
        return True

    def cancel_store(self, entry: Entry) -> None:
        """It could not be written."""
        if not entry.is_gone:
            self._remove(entry)
        self._leave(entry)

    def shrink(self, slot: int) -> None:
        """There is no room for that free slot nor for those after it: they are not used any more."""
        for each in [each for each in self._free if each >= slot]:
            del self._free[each]
            self._retired.append(each)

    def restore(self, block: TierBlock, slot: int, checksum: int) -> bool:
        """Books a block found in its slot at start, parents first; False if its parent or its slot is not to be had."""
        parent = None if block.parent is None else self._entries.get(block.parent)
        is_orphan = block.parent is not None and parent is None
        if block.key in self._entries or is_orphan or slot not in self._free:
            return False
        del self._free[slot]
        entry = self._entries[block.key] = Entry(block, slot, _depth(block, parent))
        if parent is not None:
            self._adopt(parent, block)
            self._note(parent)
        return self.finish_store(entry, checksum)

    # --- reading ---

    def match(self, keys: Sequence[bytes], token_ids: Sequence[int], block_size: int, start: int = 0) -> list[Entry]:
        """The blocks from number `start` of the chain on that can be read without a gap, each with one more reader.

        Token ids are compared too. `release` takes each back.
        """
        entries = []
        for i in range(start, len(keys)):
            entry = self._entries.get(keys[i])
            tokens = tuple(token_ids[i * block_size : (i + 1) * block_size])
            if entry is None or not entry.is_ready or entry.block.token_ids != tokens:
                break
            entry.num_readers += 1
            self._touch(entry)
            entries.append(entry)
        return entries

    def read(self, key: bytes) -> Entry | None:
        """One block with one more reader."""
        entry = self._entries.get(key)
        if entry is None or not entry.is_ready:
            return None
        entry.num_readers += 1
        self._note(entry)
        return entry

    def release(self, entries: Iterable[Entry]) -> None:
        """One reader less for each."""
        for entry in entries:
            if entry.num_readers <= 0:
                raise ValueError(f"slot {entry.slot} is released but nobody reads it")
            entry.num_readers -= 1
            if entry.is_gone:
                self._leave(entry)
            else:
                self._note(entry)

    def touch(self, keys: Iterable[bytes]) -> None:
        """They were of use elsewhere: they are evicted later."""
        for key in keys:
            if (entry := self._entries.get(key)) is not None:
                self._touch(entry)

    # --- forgetting and keeping ---

    def forget(self, key: bytes) -> list[Entry]:
        """The block and all that come after it are not found any more. Returns them, leaves first."""
        root = self._entries.get(key)
        neighbours = [] if root is None else self._windows.neighbours(root)
        found = [] if root is None else [root]
        for entry in found:  # grows while it is walked
            found += [self._entries[child] for child in entry.children]
            entry.is_gone = True  # so none becomes a leaf on the way
        for entry in reversed(found):
            self._remove(entry)
            if entry.is_ready:
                self._leave(entry)
        for entry in neighbours:
            self._order.look_at(entry)
        return found[::-1]

    def clear(self, owned: Owned | None = None) -> list[Entry]:
        """Forgets everything, or everything of one tenant or adapter. Returns what it was."""
        heads = [
            entry.block.key
            for entry in self._entries.values()
            if entry.block.parent is None and (owned is None or owned.has(entry.block.owner))
        ]
        forgotten = [entry for key in heads for entry in self.forget(key)]
        if not self._entries:
            self._events = [("cleared", b"")]
        return forgotten

    def pin(self, keys: Sequence[bytes], until: float) -> int:
        """Keeps the leading blocks of the chain that are here until that time. Returns how many."""
        for num_pinned, key in enumerate(keys):
            entry = self._entries.get(key)
            if entry is None or not entry.is_ready:
                return num_pinned
            if until > entry.pinned_until:
                self._pins.add(entry, until)
                self._pins.prune(len(self._entries))
                self._note(entry)
        return len(keys)

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Ends their pins."""
        for key in keys:
            if (entry := self._entries.get(key)) is not None:
                self._pins.end(entry)
                self._note(entry)

    def num_pinned(self, now: float) -> int:
        """Blocks whose pin ends after `now`; those whose pin has ended may be evicted from now on."""
        for entry in self._pins.expire(now):
            self._note(entry)
        return self._pins.num_pinned

    def take_events(self, tier: Tier = "host") -> list[CacheEvent]:
        """What changed since the last call, in order, as events of that tier."""
        pending, self._events = self._events, []
        return in_runs(pending, tier)

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not agree with each other."""
        used = [entry.slot for entry in (*self._entries.values(), *self._leaving.values())]
        _expect(
            sorted([*used, *self._free, *self._retired]) == list(range(self.num_slots)),
            "a slot is lost or has two blocks",
        )
        for key, entry in self._entries.items():
            _expect(key == entry.block.key and not entry.is_gone, "an entry is booked under another key")
            _expect(entry.is_ready or not (entry.children or entry.num_readers), "an unwritten block is in use")
            if entry.block.parent is not None:
                parent = self._entries.get(entry.block.parent)
                _expect(parent is not None and parent.is_ready and key in parent.children, "a block has no parent")
                _expect(entry.depth == _depth(entry.block, parent), "a block has another number")
            _expect(all(child in self._entries for child in entry.children), "a block has a child that is gone")
            full = {child for child in entry.children if self._entries[child].block.group < self.chain.num_full}
            _expect(entry.heirs == full, "a chain goes on with a window's block, or with another's")
            _expect((entry in self._order) == self._is_evictable(entry), "a leaf is missed, or another block listed")
        _expect(self.num_ready == sum(e.is_ready for e in self._entries.values()), "ready blocks are miscounted")
        _expect(all(e.is_gone and (e.num_readers or not e.is_ready) for e in self._leaving.values()), "a slot leaks")
        _expect(len(self._order) == sum(map(self._is_evictable, self._entries.values())), "a forgotten block is listed")
        self._pins.check_integrity(self._entries.values())
        self._order.check_integrity()

    # --- the books ---

    def _adopt(self, parent: Entry, child: TierBlock) -> None:
        parent.children.add(child.key)
        if child.group < self.chain.num_full:
            parent.heirs.add(child.key)

    def _disown(self, parent: Entry, child: TierBlock) -> None:
        parent.children.discard(child.key)
        parent.heirs.discard(child.key)

    def _touch(self, entry: Entry) -> None:
        self._order.use(entry)
        self._note(entry)

    def _is_evictable(self, entry: Entry) -> bool:
        idle = entry.is_ready and not entry.num_readers and not entry.children
        return idle and not entry.is_gone and not entry.pinned_until

    def _note(self, entry: Entry) -> None:
        """It was used, or has got or lost a reader, a child or a pin."""
        if self._is_evictable(entry):
            self._order.put(entry)
        else:
            self._order.remove(entry)

    def _evict(self) -> bool:
        """Makes one slot free, that of the leaf that is worth least."""
        entry = self._order.take()
        if entry is None:
            return False
        if entry.block.parent is not None:
            self._order.inherit(self._entries[entry.block.parent], entry)
        neighbours = self._windows.neighbours(entry)
        self._remove(entry)
        self._leave(entry)
        for each in neighbours:
            self._order.look_at(each)
        self.num_evictions += 1
        return True

    def _remove(self, entry: Entry) -> None:
        """It is not found any more; `_leave` follows."""
        block = entry.block
        del self._entries[block.key]
        entry.is_gone = True
        self._pins.end(entry)
        self._note(entry)
        self._leaving[entry.slot] = entry
        parent = None if block.parent is None else self._entries.get(block.parent)
        if parent is not None:
            self._disown(parent, block)
            self._note(parent)
        self._pins.prune(len(self._entries))
        if entry.is_ready:
            self.num_ready -= 1
            self._tell("removed", entry)

    def _tell(self, kind: EventKind, entry: Entry) -> None:
        if not entry.block.group:
            self._events.append((kind, entry.block.key))

    def _leave(self, entry: Entry) -> None:
        """Frees the slot of a forgotten block unless somebody reads it."""
        if not entry.num_readers:
            del self._leaving[entry.slot]
            self._free[entry.slot] = None


def _depth(block: TierBlock, parent: Entry | None) -> int:
    """Its number in its chain."""
    return 0 if parent is None else parent.depth + (block.group == 0)


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
