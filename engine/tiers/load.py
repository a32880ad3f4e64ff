"""Blocks on their way from the tiers into the device's pool."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from engine.kv_cache import KvCache
from engine.tiers.tier import Bytes, Tier
from engine.transfer.checksum import checksum
from kvstore.block_store import BlockName
from kvstore.tier_block import Entry

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

    When `done`, the first `num_loaded` blocks are right and all of them are the caller's. Whoever loses interest
    calls `abandon` and leaves the blocks to the load, which gives them back as soon as nobody writes to them.
    """

    def __init__(
        self,
        cache: KvCache,
        sources: Sequence[Source],
        block_ids: Sequence[int],
        rest: Sequence[BlockName] = (),
        token_ids: Sequence[int] = (),
    ) -> None:
        """`token_ids` are those of the whole chain."""
        self.block_ids = list(block_ids)
        self.num_loaded = 0
        self.rest = rest
        self.readings: list[Reading] = []
        self.done: Future[None] = Future()
        self._cache = cache
        self._sources = sources
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

    def num_blocks_of(self, tier: SourceName) -> int:
        """How many of the loaded blocks came from there."""
        if tier == "store":
            return self.num_from_store
        return sum(source.tier.name == tier for source in self._sources[: self.num_loaded])

    def token_ids_of(self, name: BlockName) -> tuple[int, ...]:
        size = self._cache.block_size
        return tuple(self._token_ids[name.depth * size : (name.depth + 1) * size])

    def abandon(self) -> None:
        """Nobody wants the blocks any more."""
        with self._lock:
            self._is_abandoned = True
            if not self.is_done:
                return
        self._cache.release(self.block_ids)

    def run(self, buffer: Bytes, failed: Callable[[Source], None]) -> bool:
        """Reads every block of `sources` into its row of `buffer` and verifies it, up to the first that is not right.

        True if the store is to go on.
        """
        for source, block_id in zip(self._sources, self.block_ids, strict=False):
            if self._is_abandoned:
                return False
            if not self._read(source, buffer[block_id]):
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
        self._cache.release(self.block_ids)

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
