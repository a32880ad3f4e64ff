"""What routers of one model tell each other: who was just sent what. A small stream, never waited for."""

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from kvstore.background import end_tasks, until_first_ends
from kvstore.redis_connection import CONNECTION_ERRORS, RedisTarget, close, describe, result
from kvstore.redis_keys import split_keys

logger = logging.getLogger(__name__)

# Two seconds of many routers; nobody reads further back.
_MAX_STREAM_EVENTS = 1 << 12
_MAX_WAITING = 256
_MAX_KEYS = 2048
_STREAM_LIFE_MS = 60_000
_BLOCK_SECONDS = 1.0
_FIRST_BACKOFF, _LAST_BACKOFF = 0.05, 2.0


@dataclass(frozen=True, slots=True)
class Routed:
    """A prompt with these 16-byte keys was sent to a process: so many uncached tokens, so many sequences."""

    worker_id: str
    incarnation: int
    keys: tuple[bytes, ...] = ()
    num_tokens: int = 0
    num_sequences: int = 1

    def to_fields(self) -> dict[Any, Any]:
        """As stream fields. Of a long prompt the first 2048 keys."""
        return {
            "worker": self.worker_id,
            "incarnation": str(self.incarnation),
            "tokens": str(self.num_tokens),
            "sequences": str(self.num_sequences),
            "keys": b"".join(self.keys[:_MAX_KEYS]),
        }

    @classmethod
    def from_fields(cls, fields: Mapping[bytes, bytes]) -> "Routed":
        """Reads `to_fields`; ValueError if the entry is something else."""
        try:
            return cls(
                fields[b"worker"].decode(),
                int(fields[b"incarnation"]),
                split_keys(fields[b"keys"]),
                int(fields[b"tokens"]),
                int(fields[b"sequences"]),
            )
        except KeyError as error:
            raise ValueError(f"a routing entry lacks the field {error}") from error


class RoutedStream:
    """Publishes this router's decisions and hears the others'. Best effort: what is late or lost only costs balance.

    `on_routed` is called on the event loop for each decision of another router.
    """

    def __init__(
        self, url: str, model: str, on_routed: Callable[[Routed], None], *, socket_timeout: float = 2.0
    ) -> None:
        self._target = RedisTarget.parse(url)
        self._name = f"pw:routed:{model}"
        self._on_routed = on_routed
        self._socket_timeout = socket_timeout
        self._router = os.urandom(8).hex().encode()
        self._waiting: deque[Routed] = deque(maxlen=_MAX_WAITING)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_following = False

    async def start(self) -> None:
        """Begins in the background; returns at once."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="routed-stream")

    async def stop(self) -> None:
        """Ends. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks(task)

    def publish(self, routed: Routed) -> None:
        """Returns at once. While Redis is out of reach nothing is kept: it would be old news."""
        if self.is_following:
            self._waiting.append(routed)
            self._wake.set()

    async def _run(self) -> None:
        backoff, clock = _FIRST_BACKOFF, asyncio.get_running_loop().time
        while True:
            began = clock()
            try:
                await self._serve()
            except CONNECTION_ERRORS as error:
                logger.info("routers don't hear of each other for now: %s", describe(error))
            except Exception:
                logger.exception("the stream of routing decisions failed and starts over")
            backoff = _FIRST_BACKOFF if clock() - began > _LAST_BACKOFF else min(2 * backoff, _LAST_BACKOFF)
            await asyncio.sleep(backoff)

    async def _serve(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            writer, reader = [await self._open(stack, extra) for extra in (0.0, _BLOCK_SECONDS)]
            last: Any = await result(writer.xrevrange(self._name, count=1))
            self._waiting.clear()
            self.is_following = True
            try:
                await until_first_ends([self._write(writer), self._follow(reader, last[0][0] if last else b"0-0")])
            finally:
                self.is_following = False

    async def _open(self, stack: contextlib.AsyncExitStack, extra_seconds: float) -> Redis:
        redis = await self._target.connect(self._name, self._socket_timeout + extra_seconds)
        stack.push_async_callback(close, redis)
        return redis

    async def _write(self, redis: Redis) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not self._waiting:
                continue
            async with redis.pipeline(transaction=False) as pipe:
                while self._waiting:
                    fields = {"router": self._router, **self._waiting.popleft().to_fields()}
                    pipe.xadd(self._name, fields, maxlen=_MAX_STREAM_EVENTS, approximate=True)
                pipe.pexpire(self._name, _STREAM_LIFE_MS)
                await pipe.execute()

    async def _follow(self, redis: Redis, cursor: bytes) -> None:
        while True:
            reply = await result(redis.xread({self._name: cursor}, count=64, block=int(_BLOCK_SECONDS * 1000)))
            for event_id, fields in reply[0][1] if reply else ():
                cursor = event_id
                if fields.get(b"router") == self._router:
                    continue
                try:
                    self._on_routed(Routed.from_fields(fields))
                except ValueError as error:
                    logger.warning("skipped entry %s of %s: %s", event_id.decode(), self._name, error)
            await asyncio.sleep(0)
