"""A router's side of the Redis index: a view in memory that a background task keeps equal to Redis."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from kvstore.background import end_tasks, until_first_ends, within
from kvstore.index import IndexState
from kvstore.index_view import IndexView, Position
from kvstore.redis_connection import CONNECTION_ERRORS, RedisTarget, close, describe, result
from kvstore.redis_follower import IndexFollower
from kvstore.redis_keys import MODELS, RedisKeys
from kvstore.redis_lookup import DirectLookup
from kvstore.registry import ModelRecord, WorkerRecord

logger = logging.getLogger(__name__)

_FIRST_BACKOFF, _LAST_BACKOFF = 0.05, 2.0


class RedisIndex:
    """The PrefixIndex over Redis. Losing Redis costs freshness: the view stays as it was last known.

    With `root` None, the root is that of `model` in `pw:models`; it is waited for and followed as it changes.
    `on_change` is called on the event loop when who is registered, or as what, has changed.
    """

    def __init__(
        self,
        url: str,
        root: bytes | None = None,
        *,
        model: str | None = None,
        on_change: Callable[[], None] | None = None,
        poll_seconds: float = 1.0,
        socket_timeout: float = 2.0,
        direct_timeout: float = 0.1,
    ) -> None:
        if (root is None) == (model is None):
            raise ValueError("RedisIndex follows either a root or a model's name")
        self._target = RedisTarget.parse(url)
        self._root = root
        self._model = model
        self._model_record: ModelRecord | None = None
        self.on_change = on_change
        self._poll_seconds = poll_seconds
        self._socket_timeout = socket_timeout
        self._direct = DirectLookup(direct_timeout)
        self._view = IndexView()
        self._version: tuple[IndexView, int] = (self._view, 0)
        self._follower: IndexFollower | None = None
        self._heard_at: float | None = None
        self._reported = False
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> IndexState:
        if self._task is None:
            return "off"
        return "connected" if self._follower is not None and self._follower.redis is not None else "disconnected"

    @property
    def root(self) -> bytes | None:
        """The root that is followed; None while nobody has announced the model."""
        return self._root

    @property
    def model_record(self) -> ModelRecord | None:
        """What `pw:models` says of the model, if it is followed by name."""
        return self._model_record

    @property
    def num_blocks(self) -> int:
        return self._view.memory.num_blocks

    @property
    def lag_seconds(self) -> float:
        """How far the view is behind Redis, as of the last poll; without a connection, for how long it has had none."""
        if self.state == "connected" and self._follower is not None:
            return self._follower.lag_seconds
        return 0.0 if self._heard_at is None else asyncio.get_running_loop().time() - self._heard_at

    @property
    def num_reads(self) -> int:
        """Workers read from Redis so far, first reads and repairs; every other change came as an event."""
        return self._view.num_reads

    def workers(self) -> Mapping[str, WorkerRecord]:
        return self._view.memory.workers()

    def position(self, worker_id: str) -> Position | None:
        """How far into the worker's history the view is; None if it is not registered."""
        return self._view.position(worker_id)

    def blocks(self, worker_id: str) -> frozenset[bytes]:
        """The index keys that the worker holds, as far as known."""
        return self._view.memory.blocks(worker_id)

    def lower_blocks(self, tier: str, worker_id: str) -> frozenset[bytes]:
        """The same for a tier below the device."""
        return self._view.lower[tier].blocks(worker_id)

    def lookup(self, keys: Sequence[bytes], worker_ids: Sequence[str] | None = None) -> dict[str, int]:
        return self._view.memory.lookup(keys, worker_ids)

    def lookup_lower(
        self, keys: Sequence[bytes], worker_ids: Sequence[str] | None = None
    ) -> Mapping[str, dict[str, int]]:
        return {tier: memory.lookup(keys, worker_ids) for tier, memory in self._view.lower.items() if memory.has_any}

    async def lookup_direct(
        self, keys: Sequence[bytes], worker_ids: Sequence[str] | None = None
    ) -> dict[str, int] | None:
        """`lookup`, of the device, answered by Redis in one round trip; None if it did not answer within the budget.

        Redis begins with what the view says, and searches where that is wrong.
        """
        redis = self._follower.redis if self._follower is not None else None
        if redis is None or self._root is None:
            return None
        ids = list(self.workers() if worker_ids is None else worker_ids)
        return await self._direct.lookup(redis, RedisKeys(self._root), keys, ids, self.lookup(keys, ids))

    async def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="index-view")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await end_tasks(task)
        await self._direct.close()

    async def quiesce(self, timeout: float = 10.0) -> None:
        await within(timeout, self._quiesce(asyncio.get_running_loop().time() + timeout))

    async def _quiesce(self, deadline: float) -> None:
        while asyncio.get_running_loop().time() < deadline:
            with contextlib.suppress(*CONNECTION_ERRORS):
                follower = self._follower
                if follower and follower.redis and await follower.quiesce(follower.redis):
                    self._advanced()
                    return
            await asyncio.sleep(0.01)
        raise TimeoutError("the index's view has not caught up")

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        backoff = _FIRST_BACKOFF
        while True:
            began = clock()
            try:
                await self._follow()
            except CONNECTION_ERRORS as error:
                if clock() - began > _LAST_BACKOFF or not self._reported:
                    self._reported = True
                    logger.warning("the index at %s is out of reach, will try again: %s", self._target, describe(error))
            except Exception:
                logger.exception("the index view failed and starts over")
            backoff = _FIRST_BACKOFF if clock() - began > _LAST_BACKOFF else min(2 * backoff, _LAST_BACKOFF)
            await asyncio.sleep(backoff)

    async def _follow(self) -> None:
        """Follows the root until the connection breaks (raises) or the model's name stands for another root."""
        async with contextlib.AsyncExitStack() as stack:
            watch_root: list[Coroutine[Any, Any, None]] = []
            if self._model is not None:
                models = await self._target.connect(MODELS, self._socket_timeout)
                stack.push_async_callback(close, models)
                if self._root is None:
                    await self._await_new_root(models, self._model)
                watch_root = [self._await_new_root(models, self._model)]
            assert self._root is not None
            follower = IndexFollower(
                self._target,
                RedisKeys(self._root),
                self._view,
                poll_seconds=self._poll_seconds,
                socket_timeout=self._socket_timeout,
                on_advance=self._advanced,
            )
            self._follower = follower
            try:
                await until_first_ends([follower.run(), *watch_root])
            finally:
                self._follower = None

    async def _await_new_root(self, models: Redis, name: str) -> None:
        """Returns as soon as `pw:models` has another root for the name than the one followed so far."""
        while True:
            text: Any = await result(models.hget(MODELS, name))
            if text is not None:
                self._model_record = ModelRecord.from_json(name, text)
                if self._model_record.root != self._root:
                    break
            await asyncio.sleep(self._poll_seconds)
        self._root = self._model_record.root
        self._view = IndexView()
        self._advanced()

    def _advanced(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        version = (self._view, self._view.version)
        if version != self._version:
            self._version = version
            if self.on_change is not None:
                self.on_change()
