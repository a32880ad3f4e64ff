"""How the blocks of several KV groups hang together in a tier. Pure.

The groups that keep everything are one chain, block by block; what a group with a window has hangs on its end there:

    full groups 0, 1      0·0 ─► 0·1 ─► 1·0 ─► 1·1 ─► 2·0 ─► 2·1         number · group
    sliding groups 2, 3            ├─► 0·2       ├─► 1·2       ├─► 2·2
                                   └─► 0·3       └─► 1·3       └─► 2·3

So a tier that stores only behind a parent and evicts only leaves has of the full groups what is prefix-closed, of the
others blocks here and there, and none of a prefix that it has lost. Forgetting a block forgets all that need it.

A block's name is its key, with the group in the last byte for all groups but 0: keys are SHA-256, so that no two meet.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.kv_groups import KvGroups

MAX_GROUPS = 256


class Place(NamedTuple):
    """Block `number` of a chain in one KV group."""

    number: int
    group: int = 0


class TierChain:
    """For a model of these groups, the first of which keeps everything."""

    def __init__(self, groups: KvGroups | None = None) -> None:
        self.groups = KvGroups() if groups is None else groups
        if len(self.groups) > MAX_GROUPS:
            raise ValueError(f"{len(self.groups)} KV groups, tiers can have at most {MAX_GROUPS}")
        if self.groups.groups[0].window is not None:
            raise ValueError("tiers need a KV group that keeps everything")
        self.num_full = self.groups.num_full
        self.full = range(self.num_full)
        self.sliding = range(self.num_full, len(self.groups))
        self.is_plain = self.groups.is_plain

    def name(self, key: bytes, group: int) -> bytes:
        """What a tier calls the block. The same on a name gives the key."""
        return key[:-1] + bytes((key[-1] ^ group,)) if group else key

    def names(self, keys: Sequence[bytes], places: Sequence[Place]) -> list[bytes]:
        return [self.name(keys[number], group) for number, group in places]

    def parent(self, key: bytes, before: bytes | None, group: int) -> bytes | None:
        """Name of the block that this one hangs on; `before` is the key before it in its chain, None for the first."""
        if group >= self.num_full:
            return self.name(key, self.num_full - 1)
        if group:
            return self.name(key, group - 1)
        return None if before is None else self.name(before, self.num_full - 1)

    def prefix(self, start: int, end: int) -> list[Place]:
        """The full groups' blocks number `start` … `end` - 1, parents first."""
        return [Place(number, group) for number in range(start, end) for group in self.full]

    def windows(self, depth: int) -> list[Place]:
        """What the token behind `depth` blocks sees in the groups with a window."""
        end = depth * self.groups.block_size
        firsts = self.groups.first_blocks(end)
        return [Place(number, group) for group in self.sliding for number in range(firsts[group], depth)]

    def of_hit(self, depth: int) -> list[Place]:
        """All that a sequence needs to go on behind `depth` blocks, parents first."""
        return [*self.prefix(0, depth), *self.windows(depth)]

    def num_windows(self, depth: int) -> int:
        """How many `windows` are."""
        end = depth * self.groups.block_size
        return sum(depth - self.groups.first_block(group, end) for group in self.sliding)

    def window_blocks(self, group: int) -> int:
        """The most blocks of a window that a hit needs."""
        window = self.groups.groups[group].window
        return 0 if window is None else -(-(window - 1) // self.groups.block_size)

    def deepest(self, depth: int, is_there: Callable[[int, int], bool]) -> int:
        """The deepest hit, up to `depth`, whose windows are whole; `is_there(number, group)` says what there is."""
        return self.groups.deepest_whole(
            depth, lambda group, first, end: next((i for i in range(first, end) if not is_there(i, group)), None)
        )
