"""A worker's side of the Redis index: registers under a lease, publishes each change of the cache, heals losses."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from redis.asyncio import Redis
from redis.exceptions import WatchError

from kvstore.background import end_tasks, within
from kvstore.change_buffer import Change, ChangeBuffer
from kvstore.events import CacheEvent, Tier
from kvstore.redis_connection import CONNECTION_ERRORS, RedisTarget, close, describe
from kvstore.redis_entry import LostWritesError, SupersededError, WorkerEntry
from kvstore.redis_keys import MODELS, RedisKeys
from kvstore.registry import ModelRecord, WorkerRecord

logger = logging.getLogger(__name__)

PublisherState = Literal["connected", "disconnected", "superseded", "off"]

_FIRST_BACKOFF, _LAST_BACKOFF = 0.05, 2.0


class Publisher:
    """One background task writes; nobody waits for it.

    Whenever Redis does not stand where this publisher left it, the worker is registered anew under the next
    generation with an empty set, and its blocks follow in pieces as ordinary changes, so that neither side ever
    handles one huge message.

    `snapshot` returns all cached keys (32 bytes, parents before children), is called on the event loop, and must
    contain the effect of every event that was given to `publish` before the call; `lower_snapshot` the same for the
    tiers below the device.
    """

    def __init__(
        self,
        url: str,
        record: WorkerRecord,
        root: bytes,
        snapshot: Callable[[], list[bytes]],
        *,
        model: ModelRecord | None = None,
        lease_seconds: float = 15.0,
        socket_timeout: float = 2.0,
        max_buffered_keys: int = 1 << 18,
        max_stream_events: int = 1 << 14,
        lower_snapshot: Callable[[], Mapping[Tier, Sequence[bytes]]] = dict,
    ) -> None:
        self._target = RedisTarget.parse(url)
        self._keys = RedisKeys(root)
        self._entry = WorkerEntry(replace(record, root=root), self._keys, lease_seconds, max_stream_events)
        self._snapshot = snapshot
        self._lower_snapshot = lower_snapshot
        self._model = model
        self._heartbeat_seconds = lease_seconds / 3
        self._socket_timeout = socket_timeout
        self._buffer = ChangeBuffer(max_buffered_keys)
        self._inflight: Change | None = None
        self._registered = False
        self._reported = False
        self._state: PublisherState = "off"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()

    @property
    def state(self) -> PublisherState:
        """`superseded`: another process uses this worker id; this one is silent until that one's lease ends."""
        return self._state

    @property
    def record(self) -> WorkerRecord:
        """The record with the generation and seq last written."""
        return self._entry.record

    async def start(self) -> None:
        """Begins to register in the background; returns at once whether or not Redis is there."""
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            self._state = "disconnected"
            self._task = asyncio.create_task(self._run(), name="index-publisher")

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Takes the events in order and returns at once; any thread. Before `start` the snapshot has them anyway."""
        loop = self._loop
        if not events or loop is None:
            return
        self._buffer.add(events)
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            loop.call_soon_threadsafe(self._wake.set)

    async def quiesce(self, timeout: float = 10.0) -> None:
        """Returns when everything published so far is in Redis; TimeoutError if it is not in time."""
        async with asyncio.timeout(timeout):
            while not self._is_settled():
                self._settled.clear()
                self._wake.set()
                await self._settled.wait()

    async def stop(self) -> None:
        """Deregisters, if Redis answers within the socket timeout, and ends."""
        task, self._task, self._loop = self._task, None, None
        if task is None:
            return
        await end_tasks(task)
        if self._registered and self._state == "connected":
            try:
                await within(self._socket_timeout, self._deregister())
            except (*CONNECTION_ERRORS, LostWritesError, SupersededError) as error:
                logger.warning("could not deregister from %s, the lease will end: %s", self._target, describe(error))
        self._registered = False
        self._inflight = None
        self._state = "off"

    async def _run(self) -> None:
        backoff = _FIRST_BACKOFF
        while True:
            try:
                redis = await self._target.connect(self._keys.prefix, self._socket_timeout)
                try:
                    await self._serve(redis)
                finally:
                    await close(redis)
            except SupersededError as error:
                logger.error("worker id %r is used twice: %s", self.record.worker_id, error)
                self._registered, self._state, backoff = False, "superseded", self._heartbeat_seconds
            except CONNECTION_ERRORS as error:
                if self._state == "connected" or not self._reported:
                    self._reported = True
                    logger.warning("the index at %s is out of reach, will try again: %s", self._target, describe(error))
                    backoff = _FIRST_BACKOFF
                self._state = "disconnected"
            except Exception:
                logger.exception("the index publisher failed and starts over")
                self._registered, self._state = False, "disconnected"
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _LAST_BACKOFF)

    async def _serve(self, redis: Redis) -> None:
        """Registers if needed, writes changes as they come, renews the lease; until something breaks."""
        clock = asyncio.get_running_loop().time
        next_beat = 0.0
        while True:
            try:
                if not self._registered or self._buffer.overflowed:
                    await self._register(redis)
                    next_beat = clock() + self._heartbeat_seconds
                elif clock() >= next_beat:
                    await self._entry.renew(redis)
                    next_beat = clock() + self._heartbeat_seconds
                self._state = "connected"
                if not await self._write_next(redis):
                    await self._rest(next_beat - clock())
            except LostWritesError as error:
                logger.warning("%s: the index lost writes (%s), publishing anew", self.record.worker_id, error)
                self._registered = False
            except WatchError:
                continue

    async def _register(self, redis: Redis) -> None:
        if self._model is not None:
            # `pw:models` belongs to no model: in a cluster another node may hold it.
            models = await self._target.connect(MODELS, self._socket_timeout)
            try:
                await models.hset(MODELS, self._model.name, self._model.to_json())
            finally:
                await close(models)
        await self._entry.register(redis)
        self._inflight = None
        self._buffer.restart(lambda: {"device": self._snapshot(), **self._lower_snapshot()})
        self._registered = True
        logger.info("%s registered, generation %d", self.record.worker_id, self.record.generation)

    async def _write_next(self, redis: Redis) -> bool:
        """Writes the next change; False if there is none. A change stays in flight until Redis has it."""
        self._inflight = self._inflight or self._buffer.take()
        if self._inflight is None:
            return False
        await self._entry.write(redis, self._inflight)
        self._inflight = None
        return True

    async def _rest(self, seconds: float) -> None:
        """Until there is something to write, or the heartbeat is due."""
        self._wake.clear()
        if self._is_settled():
            self._settled.set()
            # Not wait_for: in Python 3.11 it loses a cancellation that meets the wake-up.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(seconds, 0.0)):
                    await self._wake.wait()

    def _is_settled(self) -> bool:
        return self._registered and self._inflight is None and self._buffer.is_empty and not self._buffer.overflowed

    async def _deregister(self) -> None:
        redis = await self._target.connect(self._keys.prefix, self._socket_timeout)
        try:
            await self._entry.deregister(redis)
        finally:
            await close(redis)
