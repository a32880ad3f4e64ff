"""When the pins of a tier's blocks end. Pure."""

import heapq
from collections.abc import Collection, Iterator

from kvstore.tier_block import Entry

_FEW = 64
"""Times that are never worth clearing up."""


class PinTimes:
    """A heap of (until, slot, entry). Those of forgotten blocks, and those that a later pin has replaced, are void."""

    def __init__(self) -> None:
        self.num_pinned = 0
        """Entries whose pin has not been ended, by `expire` or `end`."""
        self._heap: list[tuple[float, int, Entry]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, entry: Entry, until: float) -> None:
        """The block is pinned until then."""
        self.num_pinned += not entry.pinned_until
        entry.pinned_until = until
        heapq.heappush(self._heap, (until, entry.slot, entry))

    def expire(self, now: float) -> Iterator[Entry]:
        """Ends the pins whose time has come; their blocks."""
        while self._heap and self._heap[0][0] <= now:
            _, _, entry = heapq.heappop(self._heap)
            if 0.0 < entry.pinned_until <= now:
                self.end(entry)
                yield entry

    def end(self, entry: Entry) -> None:
        """It is pinned no longer, or gone."""
        self.num_pinned -= entry.pinned_until > 0.0
        entry.pinned_until = 0.0

    def prune(self, num_blocks: int) -> None:
        """Drops what is void before it is more than the tier's blocks, `num_blocks`; O(1) on average."""
        if len(self._heap) > self._most(num_blocks):
            self._heap = [pin for pin in self._heap if pin[2].pinned_until == pin[0]]
            heapq.heapify(self._heap)

    def check_integrity(self, entries: Collection[Entry]) -> None:
        """Of a tier's blocks. Raises AssertionError when pins are miscounted or void times pile up."""
        num_pinned = sum(entry.pinned_until > 0.0 for entry in entries)
        if self.num_pinned != num_pinned:
            raise AssertionError(f"{self.num_pinned} blocks are counted as pinned, but {num_pinned} are")
        if len(self._heap) > self._most(len(entries)):
            raise AssertionError(f"{len(self._heap)} times of pins are kept for {len(entries)} blocks")

    @staticmethod
    def _most(num_blocks: int) -> int:
        return max(_FEW, 2 * num_blocks) if num_blocks else 0
