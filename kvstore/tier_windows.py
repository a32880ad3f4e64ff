"""Which blocks of sliding KV groups are still of use in a tier: those whose window is whole, or can become whole. Pure.

A hit that ends behind block d needs the blocks of its window up to d, all of them. So a block counts if it is one of as
many in a row as a window has, or if the row ends where its chain does, which may go on:

    window of 3      0  1  -  3  4  -  6  7  8        the blocks of one group that the tier has
                     ╰─ of use: a chain's first       3 and 4: torn, no hit can use them
                                       ╰────╯ of use
"""

from collections.abc import Mapping
from itertools import islice

from kvstore.tier_block import Entry
from kvstore.tier_chain import TierChain

_MOST_STEPS = 512
"""Entries looked at for a block, where chains branch much: then it is taken to be of use."""
_MOST_NEIGHBOURS = 64
"""Blocks that follow one, of thousands if all chats begin alike. Others are looked at when they are about to go."""


class TierWindows:
    """Looks at the entries of a book, by name; changes nothing."""

    def __init__(self, entries: Mapping[bytes, Entry], chain: TierChain) -> None:
        self._entries = entries
        self._chain = chain
        self._last = chain.num_full - 1  # the full group that the others hang on

    def neighbours(self, entry: Entry) -> list[Entry]:
        """Of a block of a sliding group those before and behind it, which may be torn without it."""
        group, anchor = entry.block.group, self._anchor(entry)
        if group <= self._last or anchor is None:
            return []
        before = self._before(anchor)
        around = [*([] if before is None else [before]), *self._following(anchor, _MOST_NEIGHBOURS)]
        return [found for each in around if (found := self._sibling(each, group)) is not None]

    def is_torn(self, entry: Entry) -> bool:
        """Whether no hit can use the block, now or when its chain goes on. O(blocks of a window)."""
        group = entry.block.group
        anchor = self._anchor(entry)
        if group <= self._last or anchor is None:
            return False
        most = self._chain.window_blocks(group)
        num_before = self._num_before(anchor, group, most - 1)
        if num_before >= most - 1 or num_before == entry.depth:
            return False
        return not self._goes_on(anchor, group, most - 1 - num_before)

    def _num_before(self, anchor: Entry, group: int, most: int) -> int:
        """How many blocks of the group lie before that of `anchor` without a gap, up to `most`."""
        for num_found in range(most):
            before = self._before(anchor)
            if before is None or self._sibling(before, group) is None:
                return num_found
            anchor = before
        return most

    def _anchor(self, entry: Entry) -> Entry | None:
        """What a sliding group's block hangs on."""
        return None if entry.block.parent is None else self._entries.get(entry.block.parent)

    def _before(self, anchor: Entry) -> Entry | None:
        """The last full group's block of the number before."""
        found: Entry | None = anchor
        for _ in self._chain.full:
            found = None if found is None or found.block.parent is None else self._entries.get(found.block.parent)
        return found

    def _goes_on(self, anchor: Entry, group: int, num_lacking: int) -> bool:
        """Whether so many follow without a gap, or fewer and there the chain ends."""
        ahead = [(anchor, num_lacking)]
        num_steps = 0
        while ahead:
            anchor, num_lacking = ahead.pop()
            num_steps += 1 + len(anchor.heirs)
            if not num_lacking or num_steps > _MOST_STEPS:
                return True
            following = [anchor]
            for _ in self._chain.full:
                heirs = [self._heirs(entry) for entry in following]
                if not all(heirs):  # a chain ends there, perhaps between two full groups
                    return True
                following = [entry for each in heirs for entry in each]
            ahead += [(each, num_lacking - 1) for each in following if self._sibling(each, group) is not None]
        return False

    def _following(self, anchor: Entry, most: int) -> list[Entry]:
        """The last full group's blocks of the next number, in `most` of the chains that go on from here."""
        found = [anchor]
        for _ in self._chain.full:
            found = list(islice((heir for entry in found for heir in self._heirs(entry, most)), most))
        return found

    def _heirs(self, entry: Entry, most: int | None = None) -> list[Entry]:
        return list(islice((self._entries[name] for name in entry.heirs if name in self._entries), most))

    def _sibling(self, anchor: Entry, group: int) -> Entry | None:
        """The group's block of the same number."""
        return self._entries.get(self._chain.name(self._chain.name(anchor.block.key, self._last), group))
