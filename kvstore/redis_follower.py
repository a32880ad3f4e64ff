"""Keeps an IndexView equal to Redis over one set of connections: follows the stream, polls positions, reads workers."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import WatchError

from kvstore.background import until_first_ends
from kvstore.events import LOWER_TIERS, Tier
from kvstore.index_view import START, EventId, IndexView, Position, moment
from kvstore.memory_index import MemoryIndex
from kvstore.redis_connection import RedisTarget, close, result
from kvstore.redis_keys import BlockEvent, RedisKeys
from kvstore.registry import WorkerRecord

logger = logging.getLogger(__name__)

_MIN_EVENTS_PER_READ, _MAX_EVENTS_PER_READ = 64, 512  # a read costs as much as 20 small events
_KEYS_PER_READ = 4096
_KEYS_PER_TURN = 1024  # less than a millisecond of the event loop, then others run
_KEYS_PER_EVENT = 16  # an event costs as much as so many keys
_BLOCK_SECONDS = 1.0
_BLOCKS_PER_PIECE = 1024  # 10 ms of an event loop

# Of the stream: what it follows, ids with names and values, whether as many came as were asked for.
_Piece = tuple[EventId, list[tuple[EventId, list[bytes]]], bool]


class IndexFollower:
    """Lives as long as its connections; whoever runs it makes another one when `run` raises.

        follow   XREAD from the cursor; each event goes to the view
        poll     where every registered worker stands: finds leases that ended, workers never heard of, events that
                 were lost or trimmed, and a stream that started over
        read     hash and last event id of one worker at one moment, then its set in pieces, one worker after another

    Each has its own connection, so that a large set being read holds up nobody.
    """

    def __init__(
        self,
        target: RedisTarget,
        names: RedisKeys,
        view: IndexView,
        *,
        poll_seconds: float,
        socket_timeout: float,
        on_advance: Callable[[], None],
    ) -> None:
        self._target = target
        self._names = names
        self._view = view
        self._poll_seconds = poll_seconds
        self._socket_timeout = socket_timeout
        self._on_advance = on_advance
        self._received: EventId = START  # the last event that came
        self._cursor: EventId = START  # the last one that was applied
        self._events_per_read = _MIN_EVENTS_PER_READ
        self._unread: asyncio.Queue[str] = asyncio.Queue()
        self.redis: Redis | None = None  # set while it follows
        self.lag_seconds = 0.0  # from the newest event that was applied to the newest that Redis had at the last poll

    async def run(self) -> None:
        """Follows until something breaks, and raises that."""
        async with contextlib.AsyncExitStack() as stack:
            stream = await self._open(stack, _BLOCK_SECONDS + self._socket_timeout)
            redis = await self._open(stack, self._socket_timeout)
            # First the cursor, then the positions: what happens between the two is seen twice rather than never.
            self._view.restart()
            self._received = self._cursor = (await self.positions(redis))[1]
            await self._poll(redis)
            self.redis = redis
            try:
                await until_first_ends([self._follow(stream), self._poll_on(redis), self._read_on(redis)])
            finally:
                self.redis = None

    async def _open(self, stack: contextlib.AsyncExitStack, timeout: float) -> Redis:
        redis = await self._target.connect(self._names.prefix, timeout)
        stack.push_async_callback(close, redis)
        return redis

    async def quiesce(self, redis: Redis) -> bool:
        """True when the view stands where Redis stood at the call; False if it has not got there in a second."""
        positions, last_event = await self.positions(redis)
        self._ask_for(self._view.reconcile(positions))
        for _ in range(100):
            if self._is_at(positions, last_event):
                return True
            await asyncio.sleep(0.01)
        return False

    def _is_at(self, positions: dict[str, Position], last_event: EventId) -> bool:
        workers = self._view.memory.workers()
        return (
            moment(self._cursor) >= moment(last_event)
            and not self._view.is_reading
            and workers.keys() <= positions.keys()
            and all(_has_reached(self._view.position(worker_id), position) for worker_id, position in positions.items())
        )

    async def _follow(self, stream: Redis) -> None:
        """While events are applied, the server has been asked for the next ones."""
        stream.set_response_callback("XREAD", _as_it_came)
        pieces: asyncio.Queue[_Piece] = asyncio.Queue(1)
        await until_first_ends([self._receive(stream, pieces), self._apply_all(pieces)])

    async def _receive(self, stream: Redis, pieces: "asyncio.Queue[_Piece]") -> None:
        while True:
            since, count = self._received, self._events_per_read
            read = stream.xread({self._names.events: since}, count=count, block=int(_BLOCK_SECONDS * 1000))
            reply = await result(read)
            if reply and since == self._received:  # else the stream has started over
                entries = reply[0][1]
                self._received = entries[-1][0]
                await pieces.put((since, entries, len(entries) >= count))

    async def _apply_all(self, pieces: "asyncio.Queue[_Piece]") -> None:
        num_keys = 0
        while True:
            since, entries, is_full = await pieces.get()
            num_keys_read = 0
            for event_id, pairs in entries:
                if since != self._cursor:  # the stream has started over
                    break
                try:
                    event = BlockEvent.from_pairs(pairs)
                except ValueError as error:
                    logger.warning("skipped entry %s of %s: %s", event_id.decode(), self._names.events, error)
                    continue
                if again := self._view.apply(event_id, event):
                    self._ask_for(again)
                num_changed = len(event.removed) + len(event.stored)
                num_keys_read += num_changed
                num_keys += num_changed + _KEYS_PER_EVENT
                if num_keys >= _KEYS_PER_TURN:
                    num_keys = 0
                    await asyncio.sleep(0)
            else:
                self._cursor = entries[-1][0]
                self._on_advance()
            # A backlog of small events is read in larger pieces; of large ones a piece stays about a megabyte.
            is_backlog = is_full and num_keys_read < _KEYS_PER_READ
            larger = min(2 * self._events_per_read, _MAX_EVENTS_PER_READ)
            self._events_per_read = larger if is_backlog else _MIN_EVENTS_PER_READ

    async def _poll_on(self, redis: Redis) -> None:
        while True:
            await asyncio.sleep(self._poll_seconds)
            await self._poll(redis)

    async def _poll(self, redis: Redis) -> None:
        cursor = self._cursor
        positions, last_event = await self.positions(redis)
        self.lag_seconds = max(0.0, (moment(last_event)[0] - moment(self._cursor)[0]) / 1e3)  # both by Redis's clock
        if moment(last_event) < moment(cursor):
            logger.warning("the index's event stream has started over")
            self._received = self._cursor = last_event
            self._view.restart()
            self._ask_for(self._view.expect_read(positions))
        self._ask_for(self._view.reconcile(positions))
        self._on_advance()

    async def positions(self, redis: Redis) -> tuple[dict[str, Position], EventId]:
        """Where everybody who has a lease stands, and the stream's last id, at one moment."""
        names = self._names
        ids = sorted(member.decode() for member in await result(redis.smembers(names.workers)))
        async with redis.pipeline(transaction=True) as pipe:
            for worker_id in ids:
                pipe.hmget(names.worker(worker_id), ["incarnation", "generation", "seq"])
            pipe.xrevrange(names.events, count=1)
            *found, last = await pipe.execute()
        positions: dict[str, Position] = {}
        for worker_id, values in zip(ids, found, strict=True):
            if None in values:
                await self._strike_off(redis, worker_id)
            else:
                positions[worker_id] = (int(values[0]), int(values[1]), int(values[2]))
        return positions, last[0][0] if last else START

    async def _strike_off(self, redis: Redis, worker_id: str) -> None:
        """Takes a worker without a lease off the list, unless it comes back this very moment."""
        async with redis.pipeline(transaction=True) as pipe:
            await pipe.watch(self._names.worker(worker_id))
            if await result(pipe.exists(self._names.worker(worker_id))):
                return
            pipe.multi()  # type: ignore[no-untyped-call]
            pipe.srem(self._names.workers, worker_id)
            with contextlib.suppress(WatchError):
                await pipe.execute()

    def _ask_for(self, worker_ids: Iterable[str]) -> None:
        for worker_id in worker_ids:
            self._unread.put_nowait(worker_id)

    async def _read_on(self, redis: Redis) -> None:
        while True:
            worker_id = await self._unread.get()
            await self._read(redis, worker_id)
            self._on_advance()

    async def _read(self, redis: Redis, worker_id: str) -> None:
        """The record at one moment, then the set piece by piece while it goes on changing.

        That is exact all the same: events after that moment wait and are applied on top, and for each key that
        changed meanwhile the last event decides, whether or not the scan has seen its effect already.
        """
        names = self._names
        async with redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(names.worker(worker_id))
            pipe.xrevrange(names.events, count=1)
            fields, last = await pipe.execute()
        record: WorkerRecord | None = None
        if fields:
            try:
                record = WorkerRecord.from_hash(worker_id, fields)
                await self._scan(redis, record)
            except ValueError as error:
                logger.warning("%s", error)
        num_blocks = len(self._view.memory.blocks(worker_id))
        logger.info("read %s: %s", worker_id, "not registered" if record is None else f"{num_blocks} blocks")
        self._ask_for(self._view.finish_read(worker_id, record, last[0][0] if last else START))

    async def _scan(self, redis: Redis, record: WorkerRecord) -> None:
        self._view.begin_snapshot(record)
        await self._scan_tier(redis, record, "device", self._view.memory)
        for tier in LOWER_TIERS:
            await self._scan_tier(redis, record, tier, self._view.lower[tier])

    async def _scan_tier(self, redis: Redis, record: WorkerRecord, tier: Tier, memory: MemoryIndex) -> None:
        blocks = self._names.blocks(record.worker_id, record.incarnation, tier)
        cursor = 0
        while True:
            cursor, keys = await result(redis.sscan(blocks, cursor, count=_BLOCKS_PER_PIECE))
            memory.store(record.worker_id, keys)
            if not cursor:
                return


def _as_it_came(response: Any, **kwargs: Any) -> Any:
    """Not with a dict for each entry, which costs as much as parsing it."""
    return response


def _has_reached(at: Position | None, position: Position) -> bool:
    return at is not None and at[0] == position[0] and at >= position
