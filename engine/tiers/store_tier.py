"""The lowest tier: a store that the fleet shares. All that waits for it lives on one event loop in a thread of its own.

    down   `StoreWriter`: what becomes cached is copied there
    up     touch: how far does it have the chain? ─► cheaper than computing? ─► get, verify, copy into the pool's blocks

It may hang, die, be full or give back anything: a request waits for a bounded time at most, and computes the rest.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.kv_cache import KvCache
from engine.tiers.load import TierLoad
from engine.tiers.load_costs import PRIORS, LoadCosts
from engine.tiers.store_access import StoreAccess, TooSlow
from engine.tiers.store_erase import Doomed, erase
from engine.tiers.store_format import StoreFormat
from engine.tiers.store_writer import StoreWriter
from engine.transfer.block_io import BlockIo
from kvstore.background import end_tasks
from kvstore.block_store import BlockStore, StoreError
from kvstore.tier_chain import Place, TierChain

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_LOADS = 4
_NAMES_PER_TOUCH = 512
_BYTES_PER_GET = 8 << 20
_MAX_SEARCHES = 8
"""Hits whose windows are asked for."""
_CLOSE_SECONDS = 10.0
"""Far more than what is cancelled and a store's `close` need."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """A load may take `slack` times its estimate, no longer than computing takes, but `min_deadline` seconds."""

    min_deadline: float = 0.25
    slack: float = 4.0


class StoreTier:
    """Below the pool of these `blocks`. `note`, `note_use`, `wants`, `start` and
    `counts` are for any thread; `erase`, `quiesce` and `close` for one that may wait.

    `changed` is called, on the store's thread, after something has been written. `settings` may be replaced.
    """

    def __init__(
        self, store: BlockStore, form: StoreFormat, cache: KvCache, blocks: BlockIo, changed: Callable[[], None]
    ) -> None:
        self.settings = StoreSettings()
        self.costs = LoadCosts(form.block_size, form.value_bytes, PRIORS["store"])
        self.num_corrupt = 0
        self.num_declined = 0
        self._access = StoreAccess(store)
        self._form = form
        self._blocks = blocks
        self._loop = asyncio.new_event_loop()
        self._turns = asyncio.Semaphore(_MAX_LOADS)
        self._writer = StoreWriter(self._access, form, TierChain(cache.groups), cache, blocks, self._loop, changed)
        self._thread = threading.Thread(target=self._loop.run_forever, name="tier-store", daemon=True)
        self._thread.start()
        self._writing = self._submit(self._writer.run())

    # --- down ---

    def note(self, key: bytes, group: int = 0) -> None:
        """The block has become cached."""
        self._writer.note(key, group)

    def note_use(self, keys: Sequence[bytes]) -> None:
        """A request found this chain on the device."""
        self._writer.note_use(keys)

    def holds(self, key: bytes) -> bool:
        """As far as this worker knows without asking. From any thread."""
        return self._writer.has_seen(key)

    # --- up ---

    def wants(self, num_blocks: int, num_loaded: int | None = None) -> bool:
        """Whether to ask for so many blocks of a chain: if it has them all, that had better be cheaper than computing
        them. With several KV groups they are `num_loaded` in the store."""
        may_ask = not (self._access.is_away or self._access.is_slow)
        return num_blocks > 0 and may_ask and self.costs.is_cheaper(num_blocks, self._loop.time(), num_loaded)

    def start(self, load: TierLoad, ended: Callable[[], None]) -> None:
        """Brings what it can of `load.rest`; the load and then `ended` hear of the end, whatever happens."""
        settings, now = self.settings, self._loop.time()
        num_blocks, num_loaded = self._most(load)
        until = now + self.costs.deadline(num_blocks, now, settings.slack, settings.min_deadline, num_loaded)
        self._submit(self._load(load, until, ended))

    @staticmethod
    def _most(load: TierLoad) -> tuple[int, int]:
        """Blocks of the chain, and of all groups, if the store has everything."""
        end = load.rest[-1].number + 1
        return end - load.rest_start, len(load.rest) + load.chain.num_windows(end)

    async def _load(self, load: TierLoad, until: float, ended: Callable[[], None]) -> None:
        try:
            async with self._turn(until):
                await self._bring(load, until)
        except StoreError as error:
            logger.debug("nothing more from the store: %s", error)
        except Exception:  # a bug: what was not loaded is computed
            logger.exception("a load from the store failed")
        finally:
            load.end()
            ended()

    @asynccontextmanager
    async def _turn(self, until: float) -> AsyncIterator[None]:
        """Raises StoreError if it does not come in time."""
        try:
            async with asyncio.timeout_at(until):
                await self._turns.acquire()
        except TimeoutError:
            raise StoreError("too many loads at once") from None
        try:
            yield
        finally:
            self._turns.release()

    async def _bring(self, load: TierLoad, until: float) -> None:
        """Raises StoreError; what came before that is of use, and has been measured like all else."""
        began = asked = self._loop.time()
        expected = self.costs.load_seconds(self._most(load)[1], began)
        failed = True
        try:
            num_gained, wanted = await self._find(load, until)
            asked = self._loop.time()
            if wanted and not self.costs.is_cheaper(num_gained, asked, len(wanted)):
                self.num_declined += len(wanted)
                wanted = []
            load.places += wanted
            await self._bring_all(load, wanted, until)
            failed = False
            if wanted and load.num_from_store == len(wanted):
                self._access.note_load()
        except TooSlow:
            if self._loop.time() - began >= expected:  # not if its turn came late
                self._access.note_late()
            raise
        finally:
            now = self._loop.time()
            if failed and not load.num_from_store:
                self.costs.observe_nothing(now - began, now)
            else:
                self.costs.observe(load.num_from_store, asked - began, now - asked, now)

    async def _find(self, load: TierLoad, until: float) -> tuple[int, list[Place]]:
        """The deepest hit that the store allows: by how many blocks it is deeper, and what is to be brought for it."""
        full = load.rest[: await self._num_there(load, load.rest, until)]
        if not load.chain.sliding:
            return len(full), list(full)
        end = load.rest[-1].number + 1 if len(full) == len(load.rest) else load.rest[len(full)].number
        for _ in range(_MAX_SEARCHES):
            if end <= load.rest_start:
                break
            windows = load.missing_windows(end)
            is_there = await self._there(load, windows, until)
            lacking = [place for place, there in zip(windows, is_there, strict=True) if not there]
            if not lacking:
                return end - load.rest_start, [*(place for place in full if place.number < end), *windows]
            end = min(place.number for place in lacking)  # all hits that end behind it would need it
        return 0, []

    async def _num_there(self, load: TierLoad, places: Sequence[Place], until: float) -> int:
        """How many of them the store has without a gap."""
        num_there = 0
        while num_there < len(places) and not (load.is_abandoned or self._access.is_away):
            asked = places[num_there : num_there + _NAMES_PER_TOUCH]
            is_there = await self._there(load, asked, until)
            found = is_there.index(False) if False in is_there else len(asked)
            num_there += found
            if found < len(asked):
                break
        return num_there

    async def _there(self, load: TierLoad, places: Sequence[Place], until: float) -> list[bool]:
        """Which of them the store has."""
        return await self._ask(self._access.store.touch(load.names(places)), until) if places else []

    async def _bring_all(self, load: TierLoad, wanted: Sequence[Place], until: float) -> None:
        """In order, as far as all is right."""
        most = max(1, _BYTES_PER_GET // self._form.value_bytes)
        while load.num_from_store < len(wanted) and not load.is_abandoned:
            if not await self._bring_some(load, wanted[load.num_from_store :][:most], until):
                break

    async def _bring_some(self, load: TierLoad, places: Sequence[Place], until: float) -> bool:
        """The next blocks, verified one by one; whether all were right."""
        names = load.names(places)
        values = await self._ask(self._access.store.get([name.key for name in names]), until)
        for place, name, value in zip(places, names, values, strict=True):
            if value is None:  # evicted in this moment
                return False
            with self._blocks.writing([load.block_ids[load.num_loaded]]) as rows:
                wrong = self._form.copy(value, name.key, load.token_ids_of(place), rows[0])
            if wrong:
                self.num_corrupt += 1
                logger.error("tier store: block %s is corrupt: %s", name.key.hex()[:16], wrong)
                await self._ask(self._access.store.delete([name.key]), until)
                return False
            load.num_loaded += 1
        return True

    async def _ask(self, work: Coroutine[Any, Any, T], until: float) -> T:
        return await self._access.ask_for_load(work, until - self._loop.time())

    # --- control ---

    def erase(self, doomed: Doomed) -> int:
        """Erases blocks of the fleet (see `store_erase`), and returns how many. Raises StoreError: some may be left."""

        async def run() -> int:
            async with self._writer.turn:
                self._writer.forget_seen()
                return await erase(self._access, self._form, doomed)

        return self._submit(run()).result()

    def counts(self) -> tuple[int, dict[str, int]]:
        """Blocks of the whole fleet there, and what has happened through this worker, by event."""
        writer = self._writer
        return writer.num_blocks, {
            "stored": writer.num_stored,
            "evicted": writer.num_evicted,
            "lost": writer.num_lost,
            "failed": self._access.num_failed,
            "late": self._access.num_late,
            "corrupt": self.num_corrupt,
            "declined": self.num_declined,
        }

    def quiesce(self, timeout: float) -> bool:
        """Waits until nothing is left to write; False if that took too long."""
        return self._writer.quiesce(timeout)

    def close(self) -> None:
        """When no load is under way any more. What waits is not written. Afterwards the thread is gone, in any case."""
        self._writer.stop()
        try:
            self._submit(self._end()).result(_CLOSE_SECONDS)
        except Exception:  # a bug, or a store that breaks its word: nothing more is wanted of it
            logger.exception("the store could not be closed")
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        """Ends the writer and what is left of questions that were given up."""
        here = asyncio.current_task()
        await end_tasks(*(task for task in asyncio.all_tasks() if task is not here))
        await self._access.store.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)
