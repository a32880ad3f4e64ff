"""Copies blocks that became cached into a tier, in order, on a thread of its own.

    any thread      note(key), note_use(keys) ──► jobs
    writer thread   where is it? ─► slot ─► copy ─► is it still the same block? ─► seal ─► it can be found

The device's block isn't held meanwhile: its generation is compared before and after, as one-sided readers do. So
write-back takes nothing from the pool; a block that is evicted sooner is lost to the tier, and so are those behind it.
"""

import errno
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from engine.kv_cache import KvCache
from engine.tiers.tier import Bytes, Tier
from engine.transfer.block_io import BlockIo
from engine.transfer.checksum import checksum as checksum_of
from kvstore.tier_block import Entry, TierBlock, owner_of
from kvstore.tier_chain import TierChain

logger = logging.getLogger(__name__)

MAX_PENDING = 1 << 16
"""Jobs; a block that becomes cached beyond that is not written back."""
LOG_EVERY_SECONDS = 60.0
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The disk, a quota or the longest file that may be: the tier's file cannot grow."""
_MAX_PARKED = 1 << 14
"""Blocks that wait for what they hang on: a transfer brings one KV group after the other."""


class WriteBack:
    """Fills `tier` from the pool's blocks and from the tier above it.

    `changed` is called after each change of the tier, on the writer thread.
    """

    def __init__(
        self,
        tier: Tier,
        chain: TierChain,
        cache: KvCache,
        blocks: BlockIo,
        above: Tier | None,
        changed: Callable[[], None],
    ) -> None:
        self.num_stored = 0
        self.num_lost = 0
        self.num_failed = 0
        self._tier = tier
        self._chain = chain
        self._parked: OrderedDict[bytes, list[tuple[bytes, int]]] = OrderedDict()  # by what they hang on
        self._num_parked = 0
        self._cache = cache
        self._blocks = blocks
        self._above = above
        self._changed = changed
        self._logged_at = float("-inf")
        self._wake = threading.Condition()
        self._jobs: deque[Callable[[], object]] = deque()
        self._is_busy = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"tier-{tier.name}", daemon=True)
        self._thread.start()

    def note(self, key: bytes, group: int = 0) -> None:
        """The block has become cached."""
        self._add(partial(self._store_with_parked, key, group))

    def note_use(self, keys: Sequence[bytes]) -> None:
        """A request found this chain on the device: it is to stay here too, and comes if it is missing."""
        self._add(partial(self._renew, keys))

    def erase(self) -> Future[None]:
        """Erases what was forgotten, before anything else is written; the future has the OSError if that failed."""
        erased: Future[None] = Future()

        def job() -> None:
            try:
                self._tier.slots.erase(self._tier.holds)
            except OSError as error:
                self._note_failure(error)
                erased.set_exception(error)
            except BaseException as error:  # a bug: whoever waits is to hear of it
                erased.set_exception(error)
                raise
            else:
                erased.set_result(None)

        with self._wake:
            if self._stopping:
                erased.set_result(None)
            else:
                self._jobs.appendleft(job)
                self._wake.notify_all()
        return erased

    def quiesce(self, timeout: float = 60.0) -> bool:
        """Waits until nothing is left to write; False if that took too long."""
        with self._wake:
            return self._wake.wait_for(lambda: self._stopping or not (self._jobs or self._is_busy), timeout)

    def stop(self) -> None:
        """What waits is not written any more."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join()

    def _add(self, job: Callable[[], object]) -> None:
        with self._wake:
            if len(self._jobs) >= MAX_PENDING or self._stopping:
                self.num_lost += 1
                return
            self._jobs.append(job)
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._is_busy = False
                if not self._jobs:
                    self._wake.notify_all()
                self._wake.wait_for(lambda: self._jobs or self._stopping)
                if self._stopping:
                    return
                job, self._is_busy = self._jobs.popleft(), True
            try:
                job()
            except Exception:  # a bug: the tier stays as it is, requests don't need it
                logger.exception("tier %s: a block could not be written", self._tier.name)

    def _renew(self, keys: Sequence[bytes]) -> None:
        places = self._chain.of_hit(len(keys))
        missing = set(self._tier.touch(self._chain.names(keys, places)))
        for number, group in places:
            if self._chain.name(keys[number], group) not in missing or self._store(keys[number], group):
                continue
            if group < self._chain.num_full:
                return

    def _store_with_parked(self, key: bytes, group: int) -> None:
        """The block, and all that has waited for it."""
        ready = [(key, group)]
        for each in ready:  # grows while it is walked
            if self._store(*each) and not self._chain.is_plain:
                parked = self._parked.pop(self._chain.name(*each), [])
                self._num_parked -= len(parked)
                ready += parked

    def _has_to_wait(self, parent: bytes | None, key: bytes, group: int) -> bool:
        """For what it hangs on."""
        if parent is None or self._chain.is_plain or self._tier.holds(parent):
            return False
        self._parked.setdefault(parent, []).append((key, group))
        self._num_parked += 1
        while self._num_parked > _MAX_PARKED:
            lost = len(self._parked.popitem(last=False)[1])
            self._num_parked -= lost
            self.num_lost += lost
        return True

    def _store(self, key: bytes, group: int) -> bool:
        """True if the block is in the tier afterwards."""
        name = self._chain.name(key, group)
        if self._tier.holds(name):
            return True
        above = None if self._above is None else self._above.read(name)
        if self._above is not None and above is not None:
            try:
                return not self._has_to_wait(above.block.parent, key, group) and self._store_entry(self._above, above)
            finally:
                self._above.release([above])
        cached = self._cache.locate(key, group)
        if cached is None:
            self.num_lost += 1
            return False
        parent = self._chain.parent(key, cached.block.parent, group)
        if self._has_to_wait(parent, key, group):
            return False
        owner = owner_of(cached.block.cache_salt, cached.block.adapter)
        block = TierBlock(name, parent, cached.block.token_ids, owner, group)
        with self._blocks.reading([cached.block_id]) as rows:
            return self._write(block, rows[0], lambda: self._cache.locate(key, group) == cached)

    def _store_entry(self, above: Tier, entry: Entry) -> bool:
        """From the tier above, which holds still."""
        copy = np.empty(self._blocks.block_bytes, np.uint8)
        above.slots.read(entry, copy)
        # Forgotten while it was read, it has been forgotten here too: tiers are cleared from fast to slow.
        return self._write(entry.block, copy, lambda: not entry.is_gone and checksum_of(copy.data) == entry.checksum)

    def _write(self, block: TierBlock, source: Bytes, is_right: Callable[[], bool], *, may_shrink: bool = True) -> bool:
        entry = self._tier.begin_store(block, time.monotonic())
        if entry is None:
            return False
        try:
            checksum = self._tier.slots.write(entry, source)
            if not is_right():
                self.num_lost += 1
                self._tier.cancel_store(entry)
                return False
            self._tier.slots.seal(entry, checksum)
        except OSError as error:
            self._note_failure(error)
            if not may_shrink or error.errno not in NO_ROOM:
                self._tier.cancel_store(entry)
                return False
            self._tier.cannot_grow(entry)
            return self._write(block, source, is_right, may_shrink=False)  # in the place of another block
        except BaseException:
            self._tier.cancel_store(entry)
            raise
        if not self._tier.finish_store(entry, checksum):
            self._tier.slots.erase(self._tier.holds)
            return False
        self.num_stored += 1
        self._changed()
        return True

    def _note_failure(self, error: OSError) -> None:
        """A disk that is full fails for each block: one line a minute says it."""
        self.num_failed += 1
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_SECONDS:
            self._logged_at = now
            logger.error("tier %s: blocks cannot be written (%d so far): %s", self._tier.name, self.num_failed, error)
