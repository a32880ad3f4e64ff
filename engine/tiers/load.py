"""Blocks on their way from the tiers into the device's pool."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from engine.kv_cache import KvCache
from engine.tiers.tier import Bytes, Tier
from engine.transfer.block_io import BlockIo
from engine.transfer.checksum import checksum
from kvstore.block_store import BlockName
from kvstore.kv_groups import HeldBlocks
from kvstore.tier_block import Entry
from kvstore.tier_chain import Place, TierChain

logger = logging.getLogger(__name__)

SourceName = Literal["host", "disk", "store"]
SOURCE_NAMES: tuple[SourceName, ...] = ("host", "disk", "store")
"""Where loaded blocks come from, from fast to slow."""


@dataclass(frozen=True, slots=True)
class Source:
    """A block in a tier, which does not go away before it is released."""

    tier: Tier
    entry: Entry

    def release(self) -> None:
        self.tier.release([self.entry])


@dataclass(slots=True)
class Reading:
    """What reading a run of blocks from one tier took: the first block, what came before it included, and the rest."""

    tier: Tier
    num_blocks: int
    first_seconds: float
    rest_seconds: float


class TierLoad:
    """Fills `block_ids`, which are the load's: the first from `sources`, by `run`, on a thread that may wait for a
    disk; then, if all of those came, the shared store looks for `rest`. Whoever had it last calls `end`.

    When `done`, the first `num_loaded` blocks are right, those of `places`, and all of them are the caller's. So are
    `held`: blocks of the device that the same hit needs. Whoever loses interest calls `abandon` and leaves them to the
    load, which gives them back as soon as nobody writes to them.
    """

    def __init__(
        self,
        cache: KvCache,
        sources: Sequence[Source],
        block_ids: Sequence[int],
        rest: Sequence[Place] = (),
        rest_start: int = 0,
        *,
        keys: Sequence[bytes],
        token_ids: Sequence[int],
        chain: TierChain,
        places: Sequence[Place],
        held: Mapping[Place, int] | None = None,
        depth: int = 0,
    ) -> None:
        """`keys` and `token_ids` are those of the whole chain, `places` those of the sources: with them it is a hit of
        `depth` blocks. `rest`: the full groups' blocks from number `rest_start` on that the device lacks, in order.
        """
        self.block_ids = list(block_ids)
        self.num_loaded = 0
        self.rest = rest
        self.rest_start = rest_start
        self.places = list(places)
        self.held = {} if held is None else dict(held)
        self.chain = chain
        self.depth = depth
        self.readings: list[Reading] = []
        self.done: Future[None] = Future()
        self._cache = cache
        self._sources = sources
        self._keys = keys
        self._token_ids = token_ids
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._read_at = time.monotonic()  # when a block came; first, when somebody wanted it

    @property
    def is_done(self) -> bool:
        return self.done.done()

    @property
    def is_abandoned(self) -> bool:
        return self._is_abandoned

    @property
    def num_from_store(self) -> int:
        return max(0, self.num_loaded - len(self._sources))

    @property
    def loaded(self) -> list[tuple[Place, int]]:
        """What came, and into which block."""
        return list(zip(self.places[: self.num_loaded], self.block_ids, strict=False))

    def num_blocks_of(self, tier: SourceName) -> int:
        """How many of the loaded blocks came from there."""
        return sum(name == tier for name in self._names())

    def tokens_by_source(self, num_blocks: int) -> tuple[tuple[str, int], ...]:
        """Of the first `num_blocks` blocks of the chain the tokens that came from somewhere, as group 0 has them."""
        found = Counter(
            name
            for name, place in zip(self._names(), self.places, strict=False)
            if not place.group and place.number < num_blocks
        )
        return tuple((name, found[name] * self._cache.block_size) for name in SOURCE_NAMES if found[name])

    def names(self, places: Sequence[Place]) -> list[BlockName]:
        """What the store calls them."""
        return [BlockName(self.chain.name(self._keys[number], group), number) for number, group in places]

    def token_ids_of(self, place: Place) -> tuple[int, ...]:
        size = self._cache.block_size
        return tuple(self._token_ids[place.number * size : (place.number + 1) * size])

    def missing_windows(self, depth: int) -> list[Place]:
        """What a hit of so many blocks needs of sliding groups and neither the device has nor this load has brought.

        What the device has is held from then on.
        """
        here = {*self.places[: self.num_loaded], *self.held}
        missing = []
        for place in self.chain.windows(depth):
            if place not in here:
                block_id = self._cache.take(self._keys[place.number], place.group, self.token_ids_of(place))
                if block_id is None:
                    missing.append(place)
                else:
                    self.held[place] = block_id
        return missing

    def tables(self, depth: int, starts: Sequence[int]) -> list[HeldBlocks] | None:
        """By group the blocks that a hit of so many needs, full groups' from number `starts` on; None if some are
        missing. Otherwise all that is left over is given back."""
        there = self.held | dict(self.loaded)
        firsts = [*starts, *self.chain.groups.first_blocks(depth * self._cache.block_size)[self.chain.num_full :]]
        wanted = [[Place(number, group) for number in range(first, depth)] for group, first in enumerate(firsts)]
        if not all(place in there for places in wanted for place in places):
            return None
        tables = [
            HeldBlocks(first, tuple(there.pop(place) for place in places))
            for first, places in zip(firsts, wanted, strict=True)
        ]
        self._cache.release([*there.values(), *self.block_ids[self.num_loaded :]])
        return tables

    def give_back(self) -> None:
        """When it is done: all of its blocks."""
        self._cache.release([*self.held.values(), *self.block_ids])

    def commit(self, cache_salt: str, adapter: str = "") -> list[int]:
        """Makes what came findable and gives back what was not filled. Returns the rest and `held`, whose references
        stay the caller's, in the order that `release` wants.

        A full group's block whose siblings did not come is left out: group 0 never has more than they have.
        """
        self._cache.release(self.block_ids[self.num_loaded :])
        landed, lacking = [], self._first_lacking()
        for place, block_id in self.loaded:
            number, group = place
            if group >= self.chain.num_full or number < lacking:
                block_id = self._cache.commit(
                    block_id,
                    self._keys[number],
                    self.token_ids_of(place),
                    self._keys[number - 1] if number else None,
                    cache_salt,
                    adapter,
                    group=group,
                    is_restored=True,
                )
            landed.append((place, block_id))
        if not self.chain.is_plain:  # what is worth least comes last
            landed += self.held.items()
            landed.sort(key=lambda each: (each[0].group < self.chain.num_full, each[0].number, -each[0].group))
        return [block_id for _, block_id in landed]

    def _names(self) -> list[SourceName]:
        """Where each of the loaded blocks came from."""
        local: list[SourceName] = [source.tier.name for source in self._sources[: self.num_loaded]]
        return local + [SOURCE_NAMES[-1]] * self.num_from_store

    def _first_lacking(self) -> int:
        """Number of the first block of the full groups of which some group's neither came nor was here."""
        if self.chain.num_full == 1:
            return len(self._keys)
        here = {*self.places[: self.num_loaded], *self.held}
        numbers = sorted({number for number, group in here if group < self.chain.num_full})
        siblings = (Place(number, group) for number in numbers for group in self.chain.full)
        return next(
            (
                place.number
                for place in siblings
                if place not in here and not self._cache.is_cached(self._keys[place.number], place.group)
            ),
            len(self._keys),
        )

    def abandon(self) -> None:
        """Nobody wants the blocks any more."""
        with self._lock:
            self._is_abandoned = True
            if not self.is_done:
                return
        self.give_back()

    def run(self, blocks: BlockIo, failed: Callable[[Source], None]) -> bool:
        """Reads every block of `sources` into its block of the pool and verifies it, up to the first that is not right.

        True if the store is to go on.
        """
        for source, block_id in zip(self._sources, self.block_ids, strict=False):
            if self._is_abandoned:
                return False
            with blocks.writing([block_id]) as rows:
                is_right = self._read(source, rows[0])
            if not is_right:
                failed(source)
                return False
            self.num_loaded += 1
            self._note_time(source.tier)
        return bool(self.rest)

    def end(self) -> None:
        """Nobody writes to the blocks any more."""
        for source in self._sources:
            source.release()
        with self._lock:
            self.done.set_result(None)
            if not self._is_abandoned:
                return
        self.give_back()

    def _note_time(self, tier: Tier) -> None:
        seconds, self._read_at = time.monotonic() - self._read_at, time.monotonic()
        if self.readings and self.readings[-1].tier is tier:
            self.readings[-1].num_blocks += 1
            self.readings[-1].rest_seconds += seconds
        else:
            self.readings.append(Reading(tier, 1, seconds, 0.0))

    def _read(self, source: Source, target: Bytes) -> bool:
        entry, name = source.entry, source.tier.name
        try:
            source.tier.slots.read(entry, target)
        except OSError as error:
            logger.error("tier %s: block %s cannot be read: %s", name, entry.block.key.hex()[:16], error)
            return False
        found = checksum(target.data)
        if found != entry.checksum:
            hint = f"the copy has checksum {found:016x}, stored was {entry.checksum:016x}"
            logger.error("tier %s: block %s is corrupt: %s", name, entry.block.key.hex()[:16], hint)
        return found == entry.checksum
