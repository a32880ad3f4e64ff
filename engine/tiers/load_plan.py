"""What to load of a chain so that a sequence can go on deeper in it, device and tiers together. Pure but for look-ups.

full groups      as far as device or tiers have all blocks of all of them
sliding groups   the window before the hit's end, each of its blocks on the device or in a tier
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.kv_cache import KvCache
from engine.tiers.tier import Tier
from kvstore.tier_chain import Place, TierChain


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A hit of `depth` blocks, `num_gained` more than there were: `places` in the order of loading, with where each is
    now, the number of a tier or None for the device; `counts` says how many each tier has to bring."""

    depth: int
    num_gained: int
    places: tuple[tuple[Place, int | None], ...]
    counts: tuple[int, ...]


class LoadPlanner:
    """For the chain of `keys`. Nothing is held: whoever carries a plan out finds less than it says, at worst."""

    def __init__(self, cache: KvCache, tiers: Sequence[Tier], chain: TierChain, keys: Sequence[bytes]) -> None:
        self._cache = cache
        self._tiers = tiers
        self._chain = chain
        self._keys = keys

    def hits(self, starts: Sequence[int], max_blocks: int | None) -> list[LoadPlan]:
        """The deepest hit that the fastest tier allows, that the two fastest allow, and so on, where it is deeper.

        `starts`: which block of each full group is the first that is wanted; the hit must lie behind all of them.
        """
        plans: list[LoadPlan] = []
        reaches = [self._device_reach(group, starts[group]) for group in self._chain.full]
        least = max(starts)
        for num_tiers, tier in enumerate(self._tiers, 1):
            reaches = [max(reach, self._tier_reach(tier, group, reach)) for group, reach in enumerate(reaches)]
            depth = self._servable(min(reaches), num_tiers)
            while depth > least and (plans == [] or depth > plans[-1].depth):
                plan = self._hit(starts, depth, num_tiers)
                excess = 0 if max_blocks is None else sum(plan.counts) - max_blocks
                if excess <= 0:
                    plans += [plan] if sum(plan.counts) else []
                    break
                depth = self._servable(depth - max(1, excess // len(self._chain.groups)), num_tiers)
        return plans

    def runs(self, firsts: Sequence[int], max_blocks: int | None) -> list[LoadPlan]:
        """Of each group what tiers have without a gap from number `firsts` on, likewise: somebody has the rest."""
        plans: list[LoadPlan] = []
        for num_tiers in range(1, len(self._tiers) + 1):
            ends = [self._run_end(group, first, num_tiers) for group, first in enumerate(firsts)]
            num_whole = min(ends[group] for group in self._chain.full)  # group 0 never has more than its siblings
            ends[: self._chain.num_full] = [num_whole] * self._chain.num_full
            wanted = [
                Place(number, group)
                for group, (first, end) in enumerate(zip(firsts, ends, strict=True))
                for number in range(first, end)
            ]
            wanted.sort(key=lambda place: (place.group >= self._chain.num_full, place))
            wanted = wanted[:max_blocks]
            num_gained = sum(not place.group for place in wanted)
            plan = self._plan(firsts[0] + num_gained, num_gained, wanted, num_tiers)
            if sum(plan.counts) > (sum(plans[-1].counts) if plans else 0):
                plans.append(plan)
        return plans

    def _hit(self, starts: Sequence[int], depth: int, num_tiers: int) -> LoadPlan:
        full = self._chain.prefix(min(starts), depth)
        places = [place for place in full if place.number >= starts[place.group]] + self._chain.windows(depth)
        return self._plan(depth, depth - starts[0], places, num_tiers)

    def _plan(self, depth: int, num_gained: int, wanted: Sequence[Place], num_tiers: int) -> LoadPlan:
        places = tuple((place, self._where(place, num_tiers)) for place in wanted)
        counts = tuple(sum(at == tier for _, at in places) for tier in range(len(self._tiers)))
        return LoadPlan(depth, num_gained, places, counts)

    def _servable(self, depth: int, num_tiers: int) -> int:
        def is_there(number: int, group: int) -> bool:
            is_cached = self._cache.is_cached(self._keys[number], group)
            return is_cached or self._tier_of(Place(number, group), num_tiers) is not None

        return self._chain.deepest(max(0, depth), is_there)

    def _where(self, place: Place, num_tiers: int) -> int | None:
        if self._chain.is_plain or not self._cache.is_cached(self._keys[place.number], place.group):
            return self._tier_of(place, num_tiers)
        return None

    def _tier_of(self, place: Place, num_tiers: int) -> int | None:
        """The fastest tier that has it."""
        name = self._chain.name(self._keys[place.number], place.group)
        return next((i for i, tier in enumerate(self._tiers[:num_tiers]) if tier.holds(name)), None)

    def _device_reach(self, group: int, start: int) -> int:
        """Number of the first block that the device lacks of a full group, from `start` on."""
        if self._chain.is_plain:
            return start
        return max(start, self._first(start, lambda i: not self._cache.is_cached(self._keys[i], group)))

    def _tier_reach(self, tier: Tier, group: int, start: int) -> int:
        return self._first(start, lambda i: not tier.holds(self._chain.name(self._keys[i], group)))

    def _first(self, start: int, is_missing: Callable[[int], bool]) -> int:
        """What is there of a full group is prefix-closed, so it can be bisected; most often there is nothing more."""
        if start >= len(self._keys) or is_missing(start):
            return min(start, len(self._keys))
        return start + bisect_left(range(start, len(self._keys)), True, key=is_missing)

    def _run_end(self, group: int, first: int, num_tiers: int) -> int:
        end = first
        while end < len(self._keys) and self._tier_of(Place(end, group), num_tiers) is not None:
            end += 1
        return end
