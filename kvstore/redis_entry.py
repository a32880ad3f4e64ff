"""One worker's entry in Redis: hash, sets of blocks (one a tier) and events, changed together or not at all."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from kvstore.change_buffer import Change
from kvstore.events import Tier
from kvstore.redis_keys import TIERS, BlockEvent, RedisKeys
from kvstore.redis_script import RedisScript
from kvstore.registry import WorkerRecord

_STREAM_LIFE_MS = 24 * 3600 * 1000
_POSITION = ["incarnation", "generation", "seq"]

# A worker has lost a block when it tells so, and routers promise it until they hear: so one round trip, not WATCH, a
# look and MULTI. The hash first: a server short of memory refuses that, and with it all.
# KEYS: the worker's hash, the tier's set, the stream. ARGV: incarnation, generation and seq as they should be, the
# next seq, the removed keys in one piece, the stored ones, "1" if all were cleared before, the set's lease in ms, the
# stream's length, the event's other fields.
_WRITE = RedisScript("""
local call, sub = redis.call, string.sub
local at = call('HMGET', KEYS[1], 'incarnation', 'generation', 'seq')
local num_before = call('SCARD', KEYS[2])
if at[1] ~= ARGV[1] or at[2] ~= ARGV[2] or at[3] ~= ARGV[3] then
  return {0, num_before, at[1] or '', at[2] or '', at[3] or ''}
end
local function change(command, blob)
  local first, keys = 1, {}
  while first <= #blob do
    keys[#keys + 1] = sub(blob, first, first + 15)
    first = first + 16
    if #keys == 1024 or first > #blob then
      call(command, KEYS[2], unpack(keys))
      keys = {}
    end
  end
end
call('HSET', KEYS[1], 'seq', ARGV[4])
if ARGV[7] == '1' then call('UNLINK', KEYS[2]) end
change('SREM', ARGV[5])
change('SADD', ARGV[6])
call('PEXPIRE', KEYS[2], ARGV[8])
local event = {unpack(ARGV, 10)}
if ARGV[5] ~= '' then event[#event + 1] = 'removed'; event[#event + 1] = ARGV[5] end
if ARGV[6] ~= '' then event[#event + 1] = 'stored'; event[#event + 1] = ARGV[6] end
call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[9], '*', unpack(event))
return {1, num_before, call('SCARD', KEYS[2])}
""")


class LostWritesError(Exception):
    """What Redis has of this worker is not what was written: everything must be published anew."""


class SupersededError(Exception):
    """Another process has registered under this worker's id."""


class WorkerEntry:
    """Every write changes a tier's set, the seq and the stream at one moment, by a script that looks at the hash first.

    So it happens only if Redis stands where this object left it; after FLUSHALL, an expired lease or a failover that
    lost writes it raises LostWritesError, and when another incarnation is there SupersededError. A write whose
    connection broke before the answer may be repeated: the seq in Redis tells whether it arrived. What is rarer (a
    MULTI guarded by WATCH) also raises WatchError when somebody wrote between the look and the EXEC: repeat it.
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
        self._unconfirmed: Tier | None = None  # a write was sent, for that tier, and not answered

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
        fields = self._event(record, tier=change.tier, cleared=change.cleared).to_fields()
        arguments = [
            *self.record.position,
            record.seq,
            b"".join(change.removed),
            b"".join(change.stored),
            "1" if change.cleared else "",
            2 * self._lease_ms,
            self._max_stream_events,
            *(part for field in fields.items() for part in field),
        ]
        was_sent, self._unconfirmed = self._unconfirmed, change.tier
        done, num_before, *found = await _WRITE.run(redis, [self._worker, blocks, self._keys.events], arguments)
        self._unconfirmed = None
        if done:
            num_expected, self._num_held[change.tier] = self._num_held.get(change.tier, 0), found[0]
            self.record = record
            self._check_num_held(num_before, num_expected)
        elif self._stands_at(found, was_sent):
            self.record, self._num_held[change.tier] = record, num_before

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
        await pipe.watch(self._worker)
        tier = self._unconfirmed
        arrived = self._stands_at(await pipe.hmget(self._worker, _POSITION), tier)
        if arrived and tier is not None:
            self._num_held[tier] = int(await pipe.scard(self._blocks[tier]))
            self.record, self._unconfirmed = replace(self.record, seq=self.record.seq + 1), None
        return arrived

    def _stands_at(self, position: Sequence[Any], unconfirmed: Tier | None) -> bool:
        """True where the write that was sent last has led; raises unless Redis is there or where we left it."""
        found = _parsed(position)
        if found is None:
            raise LostWritesError("there is no entry")
        incarnation, generation, seq = self.record.position
        if found[0] != incarnation:
            raise SupersededError(self._superseded_by(found[0]))
        if found == (incarnation, generation, seq + 1) and unconfirmed is not None:
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
        return _parsed(await pipe.hmget(self._worker, _POSITION))

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


def _parsed(position: Sequence[Any]) -> tuple[int, int, int] | None:
    """Of an entry that is there."""
    incarnation, generation, seq = position
    return (int(incarnation), int(generation), int(seq)) if incarnation and generation and seq else None


def _multi(pipe: Pipeline) -> None:
    """From here on commands are queued."""
    pipe.multi()  # type: ignore[no-untyped-call]
