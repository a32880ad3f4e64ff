"""All tiers of one engine: what becomes cached on the device goes down, what a request needs comes up again."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

from engine.kv_cache import KvCache
from engine.rates import Rate
from engine.tiers.eviction import SlowerTier, cost_of
from engine.tiers.load import Source, TierLoad
from engine.tiers.load_costs import PREFILL_PRIOR, PRIORS, LoadCosts, best_load
from engine.tiers.load_plan import LoadPlan, LoadPlanner
from engine.tiers.load_taken import Taken
from engine.tiers.store_erase import Doomed
from engine.tiers.store_format import StoreFormat
from engine.tiers.store_tier import StoreTier
from engine.tiers.tier import Tier, TierName
from engine.tiers.write_back import WriteBack
from engine.transfer.block_io import BlockIo
from kvstore.block_store import BlockStore, StoreError
from kvstore.events import CacheEvent
from kvstore.events import Tier as TierOfIndex
from kvstore.tier_block import Entry, Owned
from kvstore.tier_chain import TierChain

logger = logging.getLogger(__name__)

_NUM_LOADERS = 2
_ERASE_SECONDS = 60.0
"""The longest wait for a disk to forget something."""
_CLOSE_SECONDS = 60.0
"""The longest wait for loads from the store, which have deadlines."""


class KvTiers:
    """`tiers` from fast to slow, below the pool of these `blocks`; below them `store`,
    with the form of its values, which is the fleet's and not in the index. Thread-safe.

    `load_ended` is called, on a thread of the tiers, after a load has ended; set it before the first load.
    """

    def __init__(
        self,
        cache: KvCache,
        blocks: BlockIo,
        tiers: Sequence[Tier],
        store: tuple[BlockStore, StoreFormat] | None = None,
    ) -> None:
        self.tiers = tuple(tiers)
        self.load_ended: Callable[[], None] = lambda: None
        self.tier_changed: Callable[[], None] = lambda: None
        self.num_corrupt: dict[TierName, int] = {tier.name: 0 for tier in self.tiers}
        self.num_declined: dict[TierName, int] = {tier.name: 0 for tier in self.tiers}
        self.chain = TierChain(cache.groups)
        self.prefill = Rate(PREFILL_PRIOR, 0.1)
        size, num_bytes = cache.block_size, blocks.block_bytes
        self.costs = {tier.name: LoadCosts(size, num_bytes, PRIORS[tier.name], self.prefill) for tier in self.tiers}
        self._cache = cache
        self._blocks = blocks
        self._loaders = ThreadPoolExecutor(_NUM_LOADERS, thread_name_prefix="tier-load")
        self._idle = threading.Condition()
        self._num_loads = 0
        above: Sequence[Tier | None] = (None, *self.tiers)
        self._writers = [
            WriteBack(tier, self.chain, cache, blocks, upper, lambda: self.tier_changed())
            for tier, upper in zip(self.tiers, above, strict=False)
        ]
        self.store = None if store is None else StoreTier(*store, cache, blocks, lambda: self.tier_changed())
        if self.store is not None:
            self.store.costs.prefill = self.prefill
        self._price()
        cache.follow(self._note)

    def _price(self) -> None:
        """Tells each tier what its blocks are worth. It asks slower ones: so locks are taken from fast to slow."""
        slower = [] if self.store is None else [SlowerTier(self.store.costs, self.store.holds)]
        for tier in reversed(self.tiers):
            tier.price(partial(cost_of, block_size=self._cache.block_size, slower=tuple(slower)))
            slower.append(SlowerTier(self.costs[tier.name], tier.holds))

    # --- up ---

    def start_load(
        self,
        keys: Sequence[bytes],
        token_ids: Sequence[int],
        starts: Sequence[int],
        *,
        as_runs: bool = False,
        max_blocks: int | None = None,
        ask_store: bool = False,
        always: bool = False,
    ) -> TierLoad | None:
        """Begins to load what tiers have and a deeper hit of the chain needs, of each group that keeps everything from
        block number `starts` on.

        As much as had better be loaded than computed (with `always` all), at most `max_blocks`, into blocks newly taken
        from the pool. None if there is nothing, or no room for it. With `ask_store` the shared store is asked for those
        that come after them, if that may be worth it. `as_runs`: not for a hit; of each group, `starts` are of all
        groups, what there is without a gap.
        """
        plan = self._choose(LoadPlanner(self._cache, self.tiers, self.chain, keys), starts, as_runs, max_blocks, always)
        taken = Taken(self._cache, self.tiers, self.chain, keys, token_ids)
        taken.take(plan)
        begin = taken.end(plan, max(starts))
        room = None if max_blocks is None else max_blocks - len(taken.places) - self.chain.num_windows(len(keys))
        rest = taken.rest(begin, room, self.store.wants) if ask_store and self.store is not None else []
        num_blocks = len(taken.places) + len(rest) + (self.chain.num_windows(len(keys)) if rest else 0)
        block_ids = self._cache.allocate(num_blocks) if num_blocks else None
        if block_ids is None:
            taken.give_back()
            return None
        load = TierLoad(
            self._cache,
            taken.sources,
            block_ids,
            rest,
            rest_start=begin,
            keys=keys,
            token_ids=token_ids,
            chain=self.chain,
            places=taken.places,
            held=taken.held,
            depth=0 if plan is None else plan.depth,
        )
        with self._idle:
            self._num_loads += 1
        self._loaders.submit(self._run, load)
        return load

    def _choose(
        self, planner: LoadPlanner, starts: Sequence[int], as_runs: bool, max_blocks: int | None, always: bool
    ) -> LoadPlan | None:
        """The plan that saves most. Declined blocks are counted each time that somebody would have loaded them."""
        plans = planner.runs(starts, max_blocks) if as_runs else planner.hits(starts, max_blocks)
        if always or not plans:
            return plans[-1] if plans else None
        costs = [self.costs[tier.name] for tier in self.tiers]
        choices = [(plan.num_gained, list(zip(costs, plan.counts, strict=True))) for plan in plans]
        best = best_load(choices, time.monotonic())
        chosen = None if best is None else plans[best]
        for i, tier in enumerate(self.tiers):
            num_kept = 0 if chosen is None else chosen.counts[i]
            self.num_declined[tier.name] += max(0, plans[-1].counts[i] - num_kept)
        return chosen

    def _run(self, load: TierLoad) -> None:
        goes_on = False
        try:
            goes_on = load.run(self._blocks, self._discard)
        except Exception:  # a bug: what was not loaded is computed
            logger.exception("a load from the tiers failed")
        self._observe(load)
        if goes_on and self.store is not None:
            self.store.start(load, self._ended)
        else:
            load.end()
            self._ended()

    def _observe(self, load: TierLoad) -> None:
        """Learns what loading costs."""
        with self._idle:
            for reading in load.readings:
                costs, now = self.costs[reading.tier.name], time.monotonic()
                costs.observe(reading.num_blocks, reading.first_seconds, reading.rest_seconds, now, num_first=1)

    def _ended(self) -> None:
        with self._idle:
            self._num_loads -= 1
            self._idle.notify_all()
        self.load_ended()

    def _discard(self, source: Source) -> None:
        """A block that is not right is not offered again, nor what comes after it."""
        self.num_corrupt[source.tier.name] += 1
        source.tier.forget(source.entry.block.key)
        self._writers[self.tiers.index(source.tier)].erase()
        self.tier_changed()

    # --- down ---

    def _note(self, key: bytes, group: int, is_received: bool) -> None:
        for writer in self._writers:
            writer.note(key, group)
        if self.store is not None and not is_received:  # whoever computed it writes it
            self.store.note(key, group)

    def note_use(self, keys: Sequence[bytes]) -> None:
        """A request found these leading blocks on the device."""
        if not keys:
            return
        for writer in self._writers:
            writer.note_use(keys)
        if self.store is not None:
            self.store.note_use(keys)

    # --- control ---

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts: what loading is weighed against."""
        self.prefill.observe(num_tokens, seconds)

    def clear(self, owned: Owned | None = None) -> int:
        """Forgets everything, or everything of one tenant or adapter; returns how many blocks. May wait for a disk.

        Afterwards no later process finds it either. Loads under way still end. In the shared store it is erased for
        the whole fleet. Raises StoreError if that or a disk has failed, after all the rest was done.
        """
        return self._forget([(tier, tier.clear(owned)) for tier in self.tiers], Doomed(owned=owned))

    def forget(self, key: bytes, *, in_store: bool = True) -> int:
        """Forgets the block and all that come after it, in every tier and unless spared in the store; as `clear`."""
        return self._forget([(tier, tier.forget(key)) for tier in self.tiers], Doomed(first=key) if in_store else None)

    def _forget(self, forgotten: Sequence[tuple[Tier, Sequence[Entry]]], doomed: Doomed | None) -> int:
        erasing, failed = [writer.erase() for writer in self._writers], list[str]()
        for (tier, _), erased in zip(forgotten, erasing, strict=True):
            try:
                erased.result(_ERASE_SECONDS)
            except OSError as error:  # one of them is a TimeoutError
                failed.append(f"tier {tier.name}: {error or 'it takes too long'}")
        num_blocks = sum(len(entries) for _, entries in forgotten)
        num_blocks += 0 if self.store is None or doomed is None else self.store.erase(doomed)
        if failed:
            raise StoreError("; ".join(failed))
        return num_blocks

    def take_events(self) -> list[CacheEvent]:
        """What changed since the last call."""
        return [event for tier in self.tiers for event in tier.take_events()]

    def snapshot(self) -> dict[TierOfIndex, list[bytes]]:
        """All keys by tier; pending events are dropped in the same moment."""
        return {tier.name: tier.snapshot() for tier in self.tiers}

    def counts(self) -> dict[str, tuple[int, dict[str, int]]]:
        """For each tier the blocks that it has, and what has happened in it since the start, by event."""
        counts: dict[str, tuple[int, dict[str, int]]] = {
            tier.name: (
                tier.num_ready,
                {
                    "stored": writer.num_stored,
                    "evicted": tier.num_evictions,
                    "lost": writer.num_lost,
                    "failed": writer.num_failed,
                    "corrupt": self.num_corrupt[tier.name],
                    "declined": self.num_declined[tier.name],
                },
            )
            for tier, writer in zip(self.tiers, self._writers, strict=True)
        }
        return counts if self.store is None else counts | {"store": self.store.counts()}

    def quiesce(self, timeout: float = 60.0) -> bool:
        """Waits until nothing is written or loaded; False if that took too long."""
        with self._idle:
            is_quiet = self._idle.wait_for(lambda: not self._num_loads, timeout)
        is_quiet = is_quiet and all(writer.quiesce(timeout) for writer in self._writers)
        return is_quiet and (self.store is None or self.store.quiesce(timeout))

    def wait_for_load(self, timeout: float) -> None:
        """Returns when no load is under way, or after `timeout` seconds."""
        with self._idle:
            self._idle.wait_for(lambda: not self._num_loads, timeout)

    def check_integrity(self) -> None:
        """When nothing is written or loaded."""
        for tier in self.tiers:
            tier.check_integrity(is_quiet=True)

    def close(self) -> None:
        """Ends loads and write-back; afterwards nobody touches the pool's memory."""
        self._loaders.shutdown(wait=True, cancel_futures=False)
        self.wait_for_load(_CLOSE_SECONDS)
        with ExitStack() as closing:  # from the last on, each whatever happens to the others
            for tier in self.tiers:
                closing.callback(tier.slots.close)
            for writer in self._writers:
                closing.callback(writer.stop)
            if self.store is not None:
                closing.callback(self.store.close)
