"""Where a chain's holders ended when it was last looked up: guesses that the next lookup checks before it searches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, count, islice, repeat
from operator import itemgetter, ne

# (depth, bits of the workers that hold so many leading keys)
Groups = list[tuple[int, int]]
# (low, high, bits of the workers that hold low … high of them)
Range = tuple[int, int, int]

_MAX_CHAINS = 256
_MIN_GROUPS = 4  # fewer are found as fast by bisection
_MAX_STALE = 32  # indices of a chain where nobody ends any more


@dataclass(slots=True)
class KnownChain:
    """For each depth d that somebody had: the indices of its last key, d - 1, and of the next, d; ascending.

        indices  1  2  4  5        the guess is: depths 2 and 5
        holders  ab ab b  -        now b has 5 for sure; a has 3 or 4, which is searched for

    However old, it is never wrong: a depth is certain once the holders of its last key and of the next are known, and
    they are looked up anew each time; 0 is certain of whoever does not hold the first key, which is looked up, too.
    """

    indices: list[int]
    pick: itemgetter  # type: ignore[type-arg]
    masks: tuple[int, ...] = ()  # who held each index when the answer was kept; none if there is no answer
    num_keys: int = 0
    asked: object = None  # who was asked for, and who of them held the first key
    depths: dict[str, int] = field(default_factory=dict)

    def look(self, holders: Mapping[bytes, int], keys: Sequence[bytes]) -> tuple[int, ...]:
        """Who holds each index now; nothing if the keys are too few."""
        if len(keys) <= self.indices[-1]:
            return ()
        return tuple(map(holders.get, self.pick(keys), repeat(0)))

    def answer(self, masks: tuple[int, ...], num_keys: int, asked: object) -> dict[str, int] | None:
        """The depths, if nothing has changed that they depend on."""
        if masks == self.masks and num_keys == self.num_keys and asked == self.asked:
            return self.depths.copy()
        return None

    def keep(self, masks: tuple[int, ...], num_keys: int, asked: object, depths: dict[str, int]) -> None:
        """An answer that these indices alone have given."""
        self.masks, self.num_keys, self.asked, self.depths = masks, num_keys, asked, depths.copy()

    def narrow(self, masks: tuple[int, ...], num_keys: int, bits: int) -> tuple[Groups, list[Range]]:
        """What is certain of `bits`, who all hold the first key, and what is left to search."""
        groups: Groups = []
        ranges: list[Range] = []
        indices = self.indices
        if lost := bits & ~masks[0]:
            ranges.append((1, indices[0], lost))
            bits ^= lost
        for place in compress(count(1), map(ne, masks, islice(masks, 1, None))):
            if lost := bits & ~masks[place]:
                bits ^= lost
                low, high = indices[place - 1] + 1, indices[place]
                if low == high:
                    groups.append((low, lost))
                else:
                    ranges.append((low, high, lost))
        if bits and indices[-1] + 1 == num_keys:
            groups.append((num_keys, bits))
        elif bits:
            ranges.append((indices[-1] + 1, num_keys, bits))
        return groups, ranges


@dataclass(slots=True)
class KnownDepths:
    """The chains whose holders differed most recently, by their first key.

    Prompts of several chains that begin alike (one system prompt) share an entry; along what is common to them, so are
    the depths.
    """

    _chains: dict[bytes, KnownChain] = field(default_factory=dict)

    def find(self, keys: Sequence[bytes]) -> KnownChain | None:
        return self._chains.get(keys[0])

    def learn(self, keys: Sequence[bytes], groups: Groups, num_certain: int) -> None:
        """Notes where the groups ended. The first `num_certain` of them were where they were known to be."""
        known = self._chains.pop(keys[0], None)
        if len(groups) < _MIN_GROUPS:
            return
        if known is not None and len(known.indices) <= 2 * len(groups) + _MAX_STALE:
            indices, new = {*known.indices}, groups[num_certain:]
        else:
            indices, new = set[int](), groups
        num_keys = len(keys)
        for depth, _ in new:
            if depth:
                indices.add(depth - 1)
            if depth < num_keys:
                indices.add(depth)
        ordered = sorted(indices)
        self._chains[keys[0]] = KnownChain(ordered, itemgetter(*ordered))
        if len(self._chains) > _MAX_CHAINS:
            del self._chains[next(iter(self._chains))]
