"""Copies blocks that became cached into the shared store, behind everybody's back, in order, on the store's event loop.

    any thread   note(key), note_use(keys) ──► jobs (bounded: what the store is too slow for is not stored)
    the loop     touch: what is not there yet? ─► copy ─► is it still the same block? ─► put, whole or not at all

Several workers have the same blocks. Whoever computed one writes it, not who received it (`KvCache.commit`), and asks
before it copies.
"""

import asyncio
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from engine.kv_cache import KvCache
from engine.tiers.store_access import StoreAccess
from engine.tiers.store_format import StoreFormat
from engine.transfer.block_io import BlockIo
from kvstore.block_store import BlockName, StoreError
from kvstore.tier_block import TierBlock, owner_of
from kvstore.tier_chain import TierChain

logger = logging.getLogger(__name__)

MAX_PENDING = 1 << 14
"""Blocks."""
_NAMES_PER_TOUCH = 256
_BYTES_PER_PUT = 8 << 20
_TOUCH_SECONDS = 5.0
_PUT_SECONDS = 10.0
_RENEW_SECONDS = 60.0
_MAX_REMEMBERED = 1 << 16


@dataclass(frozen=True, slots=True)
class _Job:
    """Blocks `keys` of a chain in a KV group; the number of the first one, if it is known. `is_new`: one that has just
    become cached, else they are renewed, and probably there."""

    keys: Sequence[bytes]
    depth: int | None
    is_new: bool
    group: int = 0


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A block by its name in the store, and by key and KV group."""

    name: BlockName
    key: bytes
    group: int


class StoreWriter:
    """`changed` is called after each put, on the loop."""

    def __init__(
        self,
        access: StoreAccess,
        form: StoreFormat,
        chain: TierChain,
        cache: KvCache,
        blocks: BlockIo,
        loop: asyncio.AbstractEventLoop,
        changed: Callable[[], None],
    ) -> None:
        self.num_stored = 0
        self.num_evicted = 0
        self.num_lost = 0
        self.num_blocks = 0
        """In the store, the whole fleet's, as of the last put."""
        self.turn = asyncio.Lock()
        """Whoever has it is not written past."""
        self._access = access
        self._form = form
        self._chain = chain
        self._cache = cache
        self._blocks = blocks
        self._loop = loop
        self._changed = changed
        self._lock = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._num_pending = 0
        self._is_busy = False
        self._stopping = False
        self._wake = asyncio.Event()
        self._renewed: OrderedDict[bytes, float] = OrderedDict()
        self._depths: OrderedDict[bytes, int] = OrderedDict()
        self._seen: OrderedDict[bytes, float] = OrderedDict()  # there, at that time

    def note(self, key: bytes, group: int = 0) -> None:
        """The block has become cached."""
        if not self._add(_Job((key,), None, is_new=True, group=group)):
            self.num_lost += 1

    def note_use(self, keys: Sequence[bytes]) -> None:
        """A request found this chain on the device: it is to stay in the store too, and comes if it is missing.

        Said once a minute for each chain, and again if it could not be.
        """
        now = time.monotonic()
        with self._lock:
            is_due = now - self._renewed.get(keys[-1], float("-inf")) >= _RENEW_SECONDS
            are_added = [self._add(job) for job in self._renewals(keys)] if is_due else [False]
            if all(are_added):
                self._renewed[keys[-1]] = now
                _bound(self._renewed)

    def _renewals(self, keys: Sequence[bytes]) -> list[_Job]:
        """What a hit of these blocks has used, group by group."""
        firsts = self._chain.groups.first_blocks(len(keys) * self._chain.groups.block_size)
        return [
            _Job(tuple(keys[first:]), first, is_new=False, group=group)
            for group, first in enumerate(firsts)
            if first < len(keys)
        ]

    def has_seen(self, key: bytes) -> bool:
        """It was in the store when this worker last looked, as far as it remembers. From any thread, without a lock."""
        return key in self._seen

    def forget_seen(self) -> None:
        """Something was erased there."""
        self._seen.clear()

    def quiesce(self, timeout: float) -> bool:
        """Waits, on another thread, until nothing is left to write; False if that took too long."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._num_pending and not self._is_busy, timeout)

    def stop(self) -> None:
        """What waits is not written any more; the loop may end after this."""
        with self._lock:
            self._stopping = True

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while jobs := self._take():
                num_new = sum(job.is_new for job in jobs)
                num_before = self.num_stored + self.num_lost
                try:
                    async with self.turn:
                        await self._store([wanted for job in jobs for wanted in self._named(job)])
                except StoreError:
                    self.num_lost += max(0, num_new - (self.num_stored + self.num_lost - num_before))
                    with self._lock:
                        self._renewed.clear()
                except Exception:  # a bug: the store stays as it is, requests don't need it
                    logger.exception("tier store: blocks could not be written")
                self._changed()

    def _add(self, job: _Job) -> bool:
        """False if it is not taken."""
        with self._lock:
            if self._num_pending + len(job.keys) > MAX_PENDING or self._access.is_away or self._stopping:
                return False
            self._jobs.append(job)
            self._num_pending += len(job.keys)
            if self._num_pending == len(job.keys):
                self._loop.call_soon_threadsafe(self._wake.set)
        return True

    def _take(self) -> list[_Job]:
        """The next jobs; empty, and everybody told, if there are none."""
        jobs: list[_Job] = []
        num_taken = 0
        with self._lock:
            while self._jobs and num_taken < _NAMES_PER_TOUCH:
                job = self._jobs.popleft()
                room = _NAMES_PER_TOUCH - num_taken
                if len(job.keys) > room:
                    rest = None if job.depth is None else job.depth + room
                    self._jobs.appendleft(replace(job, keys=job.keys[room:], depth=rest))
                    job = replace(job, keys=job.keys[:room])
                jobs.append(job)
                num_taken += len(job.keys)
            self._num_pending -= num_taken
            self._is_busy = bool(num_taken)
            if not num_taken:
                self._lock.notify_all()
        return jobs

    def _named(self, job: _Job) -> list[_Wanted]:
        found = []
        for i, key in enumerate(job.keys):
            depth = self._depth(key) if job.depth is None else job.depth + i
            self._depths[key] = depth
            found.append(_Wanted(BlockName(self._chain.name(key, job.group), depth), key, job.group))
        _bound(self._depths)
        return found

    def _depth(self, key: bytes) -> int:
        """Its number in its chain, as far as what comes before is remembered or cached."""
        found, num_before = self._cache.locate(key), 0
        while found is not None and (parent := found.block.parent) is not None:
            num_before += 1
            if parent in self._depths:
                return self._depths[parent] + num_before
            found = self._cache.locate(parent)
        return num_before

    async def _store(self, wanted: Sequence[_Wanted]) -> None:
        """Raises StoreError; blocks before that may have been stored."""
        store, ask = self._access.store, self._access.ask
        if self._access.is_away:
            raise StoreError("away")
        is_there = await ask(store.touch([each.name for each in wanted]), _TOUCH_SECONDS)
        missing = [each for each, there in zip(wanted, is_there, strict=True) if not there]
        self._note_seen(each.name.key for each, there in zip(wanted, is_there, strict=True) if there)
        most = max(1, min(store.max_batch, _BYTES_PER_PUT // self._form.value_bytes))
        for start in range(0, len(missing), most):
            values = [(each.name, value) for each in missing[start : start + most] if (value := self._copy(each))]
            self.num_lost += min(most, len(missing) - start) - len(values)
            if values:
                stored = await ask(store.put(values), _PUT_SECONDS)
                self._access.note_put()
                self._note_seen(name.key for name, _ in values)
                self.num_stored += len(values)
                self.num_evicted += stored.num_evicted
                self.num_blocks = stored.num_blocks

    def _note_seen(self, keys: Iterable[bytes]) -> None:
        now = time.monotonic()
        for key in keys:
            self._seen[key] = now
            self._seen.move_to_end(key)
        _bound(self._seen)

    def _copy(self, wanted: _Wanted) -> bytes | None:
        """The value of a block that is on the device, None if it isn't; it is not held meanwhile."""
        key, group = wanted.key, wanted.group
        cached = self._cache.locate(key, group)
        if cached is None:
            return None
        parent = self._chain.parent(key, cached.block.parent, group)
        owner = owner_of(cached.block.cache_salt, cached.block.adapter)
        block = TierBlock(wanted.name.key, parent, cached.block.token_ids, owner, group)
        with self._blocks.reading([cached.block_id]) as rows:
            value = self._form.encode(block, rows[0])
        return value if self._cache.locate(key, group) == cached else None


def _bound(remembered: OrderedDict[bytes, float] | OrderedDict[bytes, int]) -> None:
    while len(remembered) > _MAX_REMEMBERED:
        remembered.popitem(last=False)
