"""What a load takes before it begins: blocks of tiers, the device's that the same hit needs, places for the store's."""

from collections.abc import Callable, Sequence

from engine.kv_cache import KvCache
from engine.tiers.load import Source
from engine.tiers.load_plan import LoadPlan
from engine.tiers.tier import Tier
from kvstore.tier_chain import Place, TierChain


class Taken:
    """For one chain. `sources` and their `places` are to be loaded in this order; `held` are blocks of the device.

    One reference on each is the load's, until `give_back`.
    """

    def __init__(
        self, cache: KvCache, tiers: Sequence[Tier], chain: TierChain, keys: Sequence[bytes], token_ids: Sequence[int]
    ) -> None:
        self.sources: list[Source] = []
        self.places: list[Place] = []
        self.held: dict[Place, int] = {}
        self._cache = cache
        self._tiers = tiers
        self._chain = chain
        self._keys = keys
        self._token_ids = token_ids

    def take(self, plan: LoadPlan | None) -> None:
        """What the plan says. Of other tokens nothing is used, nor what another thread has taken since: then it is
        less, and the hit shorter."""
        for place, at in () if plan is None else plan.places:
            if at is None:
                if not self._hold(place):
                    break
                continue
            tier = self._tiers[at]
            entry = tier.take(self._chain.name(self._keys[place.number], place.group), self._tokens_of(place))
            if entry is None:
                break
            self.sources.append(Source(tier, entry))
            self.places.append(place)

    def end(self, plan: LoadPlan | None, start: int) -> int:
        """Number of the block where the store would have to go on; `start`: where the load begins."""
        if plan is None or self._chain.is_plain:
            return start + len(self.places)
        return plan.depth if len(self.places) + len(self.held) == len(plan.places) else start

    def rest(self, begin: int, room: int | None, wants: Callable[[int, int], bool]) -> list[Place]:
        """The full groups' blocks from number `begin` on that are neither taken nor on the device; `room` at most, each
        number with all groups. Nothing unless the store `wants` to be asked for so many (of a group, of all).

        Those that the device has are `held` then: evicted meanwhile, they would leave a gap before what the store
        brings.
        """
        keys, here = self._keys, {*self.places, *self.held}
        if begin >= len(keys) or (room is not None and room < 1):
            return []
        wanted = [place for place in self._chain.prefix(begin, len(keys)) if place not in here]
        rest = wanted
        if not self._chain.is_plain:
            rest = [place for place in wanted if not self._cache.is_cached(keys[place.number], place.group)]
        if not wants(len(keys) - begin, len(rest) + self._chain.num_windows(len(keys))):
            return []
        if rest and not self._chain.is_plain:
            lacking = set(rest)
            rest = [place for place in wanted if place in lacking or not self._hold(place)]
        if room is None or len(rest) <= room:
            return rest
        return [place for place in rest if place.number < rest[room].number]

    def give_back(self) -> None:
        """Everything."""
        for source in self.sources:
            source.release()
        self._cache.release(list(self.held.values()))

    def _hold(self, place: Place) -> bool:
        block_id = self._cache.take(self._keys[place.number], place.group, self._tokens_of(place))
        if block_id is not None:
            self.held[place] = block_id
        return block_id is not None

    def _tokens_of(self, place: Place) -> tuple[int, ...]:
        size = self._cache.block_size
        return tuple(self._token_ids[place.number * size : (place.number + 1) * size])
