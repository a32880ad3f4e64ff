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


@dataclass(slots=True)
class KnownChain:
    """Places are numbers of leading keys, ascending: d and d + 1 for each depth d that somebody had.

        places   2  3  5  6        the guess is: depths 2 and 5
        holders  ab ab b  -        now b has 5 for sure; a has 3 or 4, which is searched for

    However old, it is never wrong: a depth is certain once the holders of key d and of key d + 1 are known, and they
    are looked up anew each time.
    """

    places: list[int]
    pick: itemgetter  # type: ignore[type-arg]
    num_keys: int
    asked: object  # who was asked for; the answer below is theirs
    depths: dict[str, int]
    masks: tuple[int, ...]

    def look(self, holders: Mapping[bytes, int], keys: Sequence[bytes]) -> tuple[int, ...]:
        """Who holds each place now; nothing if the keys are too few."""
        if len(keys) < self.places[-1]:
            return ()
        return tuple(map(holders.get, self.pick(keys), repeat(0)))

    def answer(self, masks: tuple[int, ...], num_keys: int, asked: object) -> dict[str, int] | None:
        """The depths, if nothing has changed that they depend on."""
        if masks == self.masks and num_keys == self.num_keys and asked == self.asked:
            return self.depths.copy()
        return None

    def refresh(self, masks: tuple[int, ...], num_keys: int, asked: object, depths: dict[str, int]) -> None:
        """The same places, and what is there now."""
        self.masks, self.num_keys, self.asked, self.depths = masks, num_keys, asked, depths.copy()

    def narrow(self, masks: tuple[int, ...], num_keys: int, bits: int) -> tuple[Groups, list[Range]]:
        """What is certain of `bits`, who all hold the first key, and what is left to search."""
        groups: Groups = []
        ranges: list[Range] = []
        places = self.places
        if lost := bits & ~masks[0]:
            ranges.append((1, places[0] - 1, lost))
            bits ^= lost
        for index in compress(count(1), map(ne, masks, islice(masks, 1, None))):
            if lost := bits & ~masks[index]:
                bits ^= lost
                low, high = places[index - 1], places[index] - 1
                if low == high:
                    groups.append((low, lost))
                else:
                    ranges.append((low, high, lost))
        if bits:
            ranges.append((places[-1], num_keys, bits))
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

    def learn(
        self, holders: Mapping[bytes, int], keys: Sequence[bytes], groups: Groups, asked: object, depths: dict[str, int]
    ) -> None:
        """Keeps what a search has found, in the place of what was known."""
        self._chains.pop(keys[0], None)
        if len(groups) < _MIN_GROUPS:
            return
        num_keys = len(keys)
        ends = {depth for depth, _ in groups if depth}
        places = sorted(ends.union(depth + 1 for depth in ends if depth < num_keys))
        pick = itemgetter(*[place - 1 for place in places])
        masks = tuple(map(holders.get, pick(keys), repeat(0)))
        self._chains[keys[0]] = KnownChain(places, pick, num_keys, asked, depths.copy(), masks)
        if len(self._chains) > _MAX_CHAINS:
            del self._chains[next(iter(self._chains))]
