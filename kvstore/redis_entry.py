"""One worker's entry in Redis: hash, sets of blocks (one a tier) and events, changed together or not at all."""

from dataclasses import replace
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import WatchError

from kvstore.change_buffer import Change
from kvstore.events import Tier
from kvstore.redis_keys import TIERS, BlockEvent, RedisKeys
from kvstore.registry import WorkerRecord

_STREAM_LIFE_MS = 24 * 3600 * 1000


class LostWritesError(Exception):
    """What Redis has of this worker is not what was written: everything must be published anew."""


class SupersededError(Exception):
    """Another process has registered under this worker's id."""


class WorkerEntry:
    """Every write is one MULTI over a tier's set, the seq and the stream, guarded by WATCH on the worker's hash.

    So it happens only if Redis stands where this object left it; after FLUSHALL, an expired lease or a failover that
    lost writes it raises LostWritesError, when another incarnation is there SupersededError, and WatchError when
    somebody wrote between the look and the EXEC (repeat it). A write whose connection broke after EXEC may be
    repeated: the seq in Redis tells whether it arrived.
    """

    def __init__(self, record: WorkerRecord, keys: RedisKeys, lease_seconds: float, max_stream_events: int) -> None:
        self.record = record
        self._keys = keys
        self._worker = keys.worker(record.worker_id)
        self._blocks: dict[Tier, str] = {
            tier: keys.blocks(record.worker_id, record.incarnation, tier) for tier in TIERS
        }
        self._lease_ms = int(lease_seconds * 1000)
        self._max_stream_events = max_stream_events
        self._num_held: dict[Tier, int] = {}  # SCARD after the last write: a set must not shrink behind our back either
        self._unconfirmed: Tier | None = None  # an EXEC was sent, for that tier, and not answered

    async def register(self, redis: Redis) -> None:
        """Takes the name for this incarnation, under the next generation, with an empty set.

        The first time whoever had the name is replaced; later another incarnation means that this one was.
        """
        async with redis.pipeline(transaction=True) as pipe:
            found = await self._watch(pipe)
            if found is not None and found[0] != self.record.incarnation and self.record.generation:
                raise SupersededError(self._superseded_by(found[0]))
            generation = self.record.generation + 1
            if found is not None and found[0] == self.record.incarnation:
                generation = max(generation, found[1] + 1)
            record = replace(self.record, generation=generation, seq=1)
            _multi(pipe)
            if found is not None:
                pipe.unlink(*(self._keys.blocks(record.worker_id, found[0], tier) for tier in TIERS))
            pipe.unlink(*self._blocks.values(), self._worker)
            fields: dict[Any, Any] = dict(record.to_hash())
            pipe.hset(self._worker, mapping=fields)
            self._add_event(pipe, self._event(record, kind="registered", cleared=True))
            self._renew(pipe)
            await pipe.execute()
        self.record, self._num_held, self._unconfirmed = record, {}, None

    async def write(self, redis: Redis, change: Change) -> None:
        """Applies a change. After a connection error it must be called again with the same change."""
        record, blocks = replace(self.record, seq=self.record.seq + 1), self._blocks[change.tier]
        async with redis.pipeline(transaction=True) as pipe:
            if await self._arrived(pipe):
                return
            _multi(pipe)
            pipe.scard(blocks)
            if change.cleared:
                pipe.unlink(blocks)
            if change.removed:
                pipe.srem(blocks, *change.removed)
            if change.stored:
                pipe.sadd(blocks, *change.stored)
            pipe.hset(self._worker, "seq", str(record.seq))
            changes = {"cleared": change.cleared, "removed": change.removed, "stored": change.stored}
            self._add_event(pipe, self._event(record, tier=change.tier, **changes))
            pipe.pexpire(blocks, 2 * self._lease_ms)
            pipe.scard(blocks)
            self._unconfirmed = change.tier
            try:
                results = await pipe.execute()
            except WatchError:
                self._unconfirmed = None
                raise
        num_expected = self._num_held.get(change.tier, 0)
        self.record, self._unconfirmed = record, None
        self._num_held[change.tier] = int(results[-1])
        self._check_num_held(int(results[0]), num_expected)

    async def renew(self, redis: Redis) -> None:
        """Extends the lease, after a look at whether Redis still has what was written."""
        async with redis.pipeline(transaction=True) as pipe:
            if await self._arrived(pipe):
                return
            for tier, num_held in self._num_held.items():
                self._check_num_held(int(await pipe.scard(self._blocks[tier])), num_held)
            _multi(pipe)
            self._renew(pipe)
            await pipe.execute()

    async def deregister(self, redis: Redis) -> None:
        """Removes the entry, if it is still this incarnation's."""
        async with redis.pipeline(transaction=True) as pipe:
            await self._arrived(pipe)
            record = replace(self.record, seq=self.record.seq + 1)
            _multi(pipe)
            pipe.unlink(self._worker, *self._blocks.values())
            pipe.srem(self._keys.workers, record.worker_id)
            self._add_event(pipe, self._event(record, kind="deregistered", cleared=True))
            await pipe.execute()

    async def _arrived(self, pipe: Pipeline) -> bool:
        """Watches the hash; raises unless it stands where we left it.

        True if the write that was sent last turns out to have arrived; it is accounted for then.
        """
        found = await self._watch(pipe)
        if found is None:
            raise LostWritesError("there is no entry")
        incarnation, generation, seq = self.record.position
        if found[0] != incarnation:
            raise SupersededError(self._superseded_by(found[0]))
        if found == (incarnation, generation, seq + 1) and (tier := self._unconfirmed) is not None:
            self._num_held[tier] = int(await pipe.scard(self._blocks[tier]))
            self.record, self._unconfirmed = replace(self.record, seq=seq + 1), None
            return True
        if found != (incarnation, generation, seq):
            raise LostWritesError(f"it is at {found[1]}/{found[2]} instead of {generation}/{seq}")
        return False

    @staticmethod
    def _check_num_held(found: int, expected: int) -> None:
        """A server short of memory may evict the set and keep the hash."""
        if found != expected:
            raise LostWritesError(f"{found} blocks where {expected} were written")

    async def _watch(self, pipe: Pipeline) -> tuple[int, int, int] | None:
        """(incarnation, generation, seq) in Redis, from now on guarded until `execute`."""
        await pipe.watch(self._worker)
        values: list[Any] = await pipe.hmget(self._worker, ["incarnation", "generation", "seq"])
        return None if None in values else (int(values[0]), int(values[1]), int(values[2]))

    def _event(self, record: WorkerRecord, **changes: Any) -> BlockEvent:
        return BlockEvent(record.worker_id, *record.position, **changes)

    def _add_event(self, pipe: Pipeline, event: BlockEvent) -> None:
        fields: dict[Any, Any] = dict(event.to_fields())
        pipe.xadd(self._keys.events, fields, maxlen=self._max_stream_events, approximate=True)

    def _renew(self, pipe: Pipeline) -> None:
        """The set outlives the hash, so that a living hash never points at a set that has expired."""
        pipe.sadd(self._keys.workers, self.record.worker_id)
        pipe.pexpire(self._worker, self._lease_ms)
        for blocks in self._blocks.values():
            pipe.pexpire(blocks, 2 * self._lease_ms)
        pipe.pexpire(self._keys.events, _STREAM_LIFE_MS)
        pipe.pexpire(self._keys.workers, _STREAM_LIFE_MS)

    def _superseded_by(self, incarnation: int) -> str:
        return (
            f"incarnation {incarnation:x} has registered under it, {self.record.incarnation:x} stays out of the index"
        )


def _multi(pipe: Pipeline) -> None:
    """From here on commands are queued."""
    pipe.multi()  # type: ignore[no-untyped-call]
