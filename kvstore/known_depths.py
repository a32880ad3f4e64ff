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


@dataclass(frozen=True, slots=True)
class _Learned:
    """What a lookup has found: made into a `KnownChain` by the next one of that chain, if there is any."""

    known: KnownChain | None
    groups: Groups
    num_certain: int
    num_keys: int

    def chain(self) -> KnownChain:
        known, groups = self.known, self.groups
        if known is not None and len(known.indices) <= 2 * len(groups) + _MAX_STALE:
            indices, new = {*known.indices}, groups[self.num_certain :]
        else:
            indices, new = set[int](), groups
        for depth, _ in new:
            if depth:
                indices.add(depth - 1)
            if depth < self.num_keys:
                indices.add(depth)
        ordered = sorted(indices)
        return KnownChain(ordered, itemgetter(*ordered))


@dataclass(slots=True)
class KnownDepths:
    """The chains whose holders differed most recently, by their first key.

    Prompts of several chains that begin alike (one system prompt) share an entry; along what is common to them, so are
    the depths.
    """

    _chains: dict[bytes, KnownChain | _Learned] = field(default_factory=dict)

    def find(self, keys: Sequence[bytes]) -> KnownChain | None:
        known = self._chains.get(keys[0])
        if isinstance(known, _Learned):
            known = self._chains[keys[0]] = known.chain()
        return known

    def learn(self, keys: Sequence[bytes], groups: Groups, num_certain: int) -> None:
        """Notes where the groups ended. The first `num_certain` of them were where `find` has said just now."""
        known = self._chains.pop(keys[0], None)
        if len(groups) < _MIN_GROUPS:
            return
        self._chains[keys[0]] = _Learned(
            known if isinstance(known, KnownChain) else None, groups, num_certain, len(keys)
        )
        if len(self._chains) > _MAX_CHAINS:
            del self._chains[next(iter(self._chains))]
