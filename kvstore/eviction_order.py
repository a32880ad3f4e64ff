"""Which leaf of a tier is evicted next: GreedyDual, with a bounded number of prices for each eviction.

GreedyDual (Young 1994; Cao and Irani 1997; all blocks are of one size) takes the one with the least

    value = age when it was last of use + what it costs to have it again      age = value of what was evicted last

so a block that costs twice as much stays unused twice as long. Of equal values the least recently used goes; with one
cost for all that is LRU.

A leaf is priced when it comes and when it is used. Prices change meanwhile (a slower tier gains or loses the block, or
becomes slow), so each eviction prices a few leaves anew: some in turn, whoever they are, then those that seem to be
worth least. O(log n), with at most `MAX_PRICED` prices, whatever has changed: the tier's lock is held meanwhile. What
is found to be useless then has no value at all.
"""

from collections.abc import Callable

from kvstore.tier_block import Entry

CostOf = Callable[[Entry], float]
"""What it costs to have a block again; at least 0, in any one unit."""
IsUseless = Callable[[Entry], bool]
"""Whether nobody can use a block for lack of others. Asked for what is about to go, and by `look_at`."""
MAX_PRICED = 8
"""Prices asked for an eviction at most."""
_IN_TURN = 2
"""Of them those of leaves whose turn it is. So a price gets about half as many evictions old as there are leaves."""

_Item = tuple[float, int, Entry]  # (value, stamp, leaf); no two stamps are equal


class EvictionOrder:
    """Leaves in a binary heap; each knows its `position` there, so that it can be moved and taken out (heapq can't).

    Pure. `stamp` and `age` of an entry are changed by `use` and `inherit` only.
    """

    def __init__(self, cost_of: CostOf, is_useless: IsUseless = lambda entry: False) -> None:
        self._cost_of = cost_of
        self._is_useless = is_useless
        self._heap: list[_Item] = []
        self._clock = 0
        self._age = 0.0
        self._hand = 0

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, entry: Entry) -> bool:
        return entry.position >= 0

    def use(self, entry: Entry) -> None:
        """It was of use now; one that is among the leaves must be `put` again."""
        self._clock += 1
        entry.stamp, entry.age = self._clock, self._age
        entry.num_uses += 1

    def inherit(self, parent: Entry, child: Entry) -> None:
        """Whoever used the block that is evicted has used its parent."""
        if parent.stamp < child.stamp:
            parent.stamp, parent.age = child.stamp, child.age

    def put(self, entry: Entry) -> None:
        """It is a leaf that may be evicted; asks for its price."""
        entry.cost = self._cost_of(entry)
        self._place(entry)

    def look_at(self, entry: Entry) -> None:
        """As `put`, if it is among the leaves, and it is looked at whether anybody can use it."""
        if entry.position < 0:
            return
        entry.cost = -1.0 - entry.age if self._is_useless(entry) else self._cost_of(entry)
        self._place(entry)

    def _place(self, entry: Entry) -> None:
        item = (entry.age + entry.cost, entry.stamp, entry)
        if entry.position < 0:
            entry.position = len(self._heap)
            self._heap.append(item)
        self._sift(item, entry.position)

    def remove(self, entry: Entry) -> None:
        """It may not be evicted now; nothing happens if it isn't here."""
        at, entry.position = entry.position, -1
        if at < 0:
            return
        last = self._heap.pop()
        if last[2] is not entry:
            self._sift(last, at)

    def take(self) -> Entry | None:
        """Takes the leaf out that is worth least."""
        if not self._heap:
            return None
        for _ in range(min(_IN_TURN, len(self._heap))):
            self._hand = (self._hand + 1) % len(self._heap)
            if self._heap[self._hand][0] >= 0:  # else it was found to be useless
                self.put(self._heap[self._hand][2])
        least = self._heap[0]
        dearer: list[_Item] = []
        for _ in range(MAX_PRICED - _IN_TURN):
            entry = least[2]
            self.look_at(entry)
            value = entry.age + entry.cost
            if value <= least[0]:  # not dearer than it seemed
                break
            dearer.append((value, entry.stamp, entry))
            least = self._heap[0]
        else:
            _, _, entry = min(dearer)  # nearly all may have become dearer: the best of those that were looked at
        self.remove(entry)
        self._age = max(self._age, entry.age + entry.cost)
        return entry

    def price(self, cost_of: CostOf) -> None:
        """Prices all leaves anew, by that; O(n log n)."""
        self._cost_of = cost_of
        for _, _, entry in tuple(self._heap):
            self.put(entry)

    def check_integrity(self) -> None:
        """Raises AssertionError when the heap is none."""
        for at, (value, stamp, entry) in enumerate(self._heap):
            is_right = entry.position == at and (value, stamp) == (entry.age + entry.cost, entry.stamp)
            if not is_right or self._heap[(at - 1) // 2 if at else 0][:2] > (value, stamp):
                raise AssertionError(f"the leaf at {at} of {len(self._heap)} is not where it belongs")

    def _sift(self, item: _Item, at: int) -> None:
        """Puts the item where it belongs, on the way up or down from `at`."""
        heap = self._heap
        while at and item < heap[(at - 1) // 2]:
            self._set(at, heap[(at - 1) // 2])
            at = (at - 1) // 2
        while (child := 2 * at + 1) < len(heap):
            if child + 1 < len(heap) and heap[child + 1] < heap[child]:
                child += 1
            if item < heap[child]:
                break
            self._set(at, heap[child])
            at = child
        self._set(at, item)

    def _set(self, at: int, item: _Item) -> None:
        self._heap[at] = item
        item[2].position = at
