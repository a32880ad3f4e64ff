"""KV blocks in Redis or Valkey, shared by a small fleet, under keys that the prefix index never has.

    pwkv:{<first 16 bytes of the fingerprint, hex>}:<32-byte key>   STRING  the value, expires a day after its last use
    pwkv:{…}:use                                                    ZSET    key -> when it was of use, in microseconds

The fleet's own books bound the store: when blocks are added, those longest unused go until there is room, in the same
MULTI; values that could not be booked are deleted, or expire after UNBOOKED_SECONDS. A block's time of use is put back
by DEPTH_MICROS for each block before it, so of one chain the end goes first. Nothing but the fleet's own blocks is ever
evicted here. What the server loses by itself (a restart, its own eviction) is missing from the books only until its
time of use is the oldest.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import AskError, MovedError, OutOfMemoryError, ReadOnlyError, ResponseError

from kvstore.block_store import BlockName, Heads, Stored, StoreError
from kvstore.hashing import KEY_BYTES
from kvstore.redis_connection import CONNECTION_ERRORS, RedisTarget, close, describe, result

T = TypeVar("T")

_OVERHEAD_BYTES = 512
"""What the server needs beside a value's allocation, in its key space and in the books, and a little more."""
_HEADER_BYTES = 32
"""Of the server's strings, and a little more."""
TTL_SECONDS = 86400
UNBOOKED_SECONDS = 60
DEPTH_MICROS = 100_000
_SOCKET_SECONDS = 30.0
"""A net below the callers' own deadlines."""
_NAMES_PER_CALL = 512
_VALUES_PER_PUT = 32

# KEYS: use, values …; ARGV: ttl in ms, what is taken off each one's time of use. They may run on a full server.
_TOUCH = """#!lua flags=allow-oom
local time = redis.call('TIME')
local now, found = time[1] * 1000000 + time[2], {}
for i = 2, #KEYS do
  found[i - 1] = redis.call('PEXPIRE', KEYS[i], ARGV[1])
  if found[i - 1] == 1 then
    redis.call('ZADD', KEYS[1], now - ARGV[i], string.sub(KEYS[i], -32))
  end
end
redis.call('PEXPIRE', KEYS[1], 2 * ARGV[1])
return found
"""
# KEYS: use, values … just set; ARGV: most blocks, then as above. Returns blocks now and blocks evicted.
_BOOK = """#!lua flags=allow-oom
local time = redis.call('TIME')
local now, evicted = time[1] * 1000000 + time[2], 0
for i = 2, #KEYS do
  redis.call('ZREM', KEYS[1], string.sub(KEYS[i], -32))
end
local surplus = redis.call('ZCARD', KEYS[1]) + #KEYS - 1 - ARGV[1]
if surplus > 0 then
  local gone = redis.call('ZPOPMIN', KEYS[1], surplus)
  for i = 1, #gone, 2 do
    evicted = evicted + redis.call('DEL', string.sub(KEYS[2], 1, -33) .. gone[i])
  end
end
for i = 2, #KEYS do
  redis.call('ZADD', KEYS[1], now - ARGV[i + 1], string.sub(KEYS[i], -32))
  redis.call('PEXPIRE', KEYS[i], ARGV[2])
end
redis.call('PEXPIRE', KEYS[1], 2 * ARGV[2])
return {redis.call('ZCARD', KEYS[1]), evicted}
"""


def stored_bytes(value_bytes: int) -> int:
    """What the server needs for a value of so many bytes. jemalloc, which Redis and Valkey usually have, takes up to a
    quarter more than a little over it: four sizes for each power of two.
    """
    num_bytes = value_bytes + _HEADER_BYTES
    step = 1 << max(4, (num_bytes - 1).bit_length() - 3)
    return -(-num_bytes // step) * step + _OVERHEAD_BYTES


class RedisBlockStore:
    """At most `max_blocks` blocks of the fleet with that 32-byte fingerprint; a `BlockStore`."""

    def __init__(self, target: RedisTarget, fingerprint: bytes, max_blocks: int) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, got {max_blocks}")
        self._target = target
        self._max_blocks = max_blocks
        self._prefix = b"pwkv:{%b}:" % fingerprint[:16].hex().encode()
        self._use = self._prefix + b"use"
        self._client: Redis | None = None
        self._connecting = asyncio.Lock()

    def __str__(self) -> str:
        return f"the store at {self._target}"

    @property
    def max_batch(self) -> int:
        return min(_VALUES_PER_PUT, self._max_blocks)

    async def touch(self, names: Sequence[BlockName]) -> list[bool]:
        found: list[bool] = []
        for start in range(0, len(names), _NAMES_PER_CALL):
            piece = names[start : start + _NAMES_PER_CALL]
            found += [bool(each) for each in await self._ask(self._touch, piece)]
        return found

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self._ask(self._get, keys)

    async def put(self, values: Sequence[tuple[BlockName, bytes]]) -> Stored:
        if len(values) > self.max_batch:
            raise ValueError(f"{len(values)} values at once, at most {self.max_batch}")
        try:
            return await self._ask(self._put, values)
        except _ServerFull:  # of whatever: our own blocks make room, nobody else's
            await self._ask(self._make_room, 2 * len(values))
        try:
            return await self._ask(self._put, values)
        except _ServerFull as error:
            raise StoreError(f"{self}: {error}") from None

    async def heads(self, cursor: int, num_bytes: int) -> Heads:
        next_cursor, keys = await self._ask(self._scan, cursor)
        return Heads(list(zip(keys, await self._ask(self._heads, keys, num_bytes), strict=True)), next_cursor)

    async def delete(self, keys: Sequence[bytes]) -> None:
        for start in range(0, len(keys), _NAMES_PER_CALL):
            piece = keys[start : start + _NAMES_PER_CALL]
            await self._ask(self._delete, piece)

    async def close(self) -> None:
        if self._client is not None:
            await self._give_up(self._client)

    async def _ask(self, work: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Runs `work` on a client, which is given up if the server is lost; the next call finds the primary anew."""
        client: Redis | None = None
        try:
            client = await self._connected()
            return await work(client, *arguments)
        except OutOfMemoryError as error:
            raise _ServerFull(describe(error)) from None
        except CONNECTION_ERRORS as error:
            is_lost = not isinstance(error, ResponseError) or isinstance(error, MovedError | AskError | ReadOnlyError)
            if is_lost and client is not None:
                await self._give_up(client)
            raise StoreError(f"{self}: {describe(error)}") from None

    async def _connected(self) -> Redis:
        """The client of all calls."""
        async with self._connecting:
            if self._client is None:
                self._client = await self._target.connect(self._use.decode(), _SOCKET_SECONDS)
            return self._client

    async def _give_up(self, client: Redis) -> None:
        """Unless another call has done it."""
        if self._client is client:
            self._client = None
            await close(client)

    async def _touch(self, client: Redis, names: Sequence[BlockName]) -> list[int]:
        keys = [self._use, *self._names([name.key for name in names])]
        found: list[int] = await result(client.eval(_TOUCH, len(keys), *keys, *_times(names)))
        return found

    async def _get(self, client: Redis, keys: Sequence[bytes]) -> list[bytes | None]:
        values: list[bytes | None] = await result(client.mget(self._names(keys)))
        return values

    async def _put(self, client: Redis, values: Sequence[tuple[BlockName, bytes]]) -> Stored:
        names = [name for name, _ in values]
        keys = [self._use, *self._names([name.key for name in names])]
        async with client.pipeline(transaction=True) as commands:
            for key, (_, value) in zip(keys[1:], values, strict=True):
                commands.set(key, value, ex=UNBOOKED_SECONDS)
            commands.eval(_BOOK, len(keys), *keys, self._max_blocks, *_times(names))
            try:
                *_, (num_blocks, num_evicted) = await commands.execute()
            except OutOfMemoryError:  # of a SET: nothing has been done
                raise
            except ResponseError:  # of the booking, which does not undo the rest
                with suppress(*CONNECTION_ERRORS):
                    await result(client.delete(*keys[1:]))
                raise
        return Stored(int(num_blocks), int(num_evicted))

    async def _make_room(self, client: Redis, num_blocks: int) -> None:
        popped: list[tuple[bytes, float]] = await result(client.zpopmin(self._use, num_blocks))
        if popped:
            await result(client.delete(*self._names([key for key, _ in popped])))

    async def _scan(self, client: Redis, cursor: int) -> tuple[int, list[bytes]]:
        cursor, names = await result(client.scan(cursor, match=self._prefix + b"*", count=1000, _type="STRING"))
        keys = [name[len(self._prefix) :] for name in names]
        return cursor, [key for key in keys if len(key) == KEY_BYTES]

    async def _heads(self, client: Redis, keys: Sequence[bytes], num_bytes: int) -> list[bytes]:
        async with client.pipeline(transaction=False) as commands:
            for name in self._names(keys):
                commands.getrange(name, 0, num_bytes - 1)
            heads: list[bytes] = await commands.execute()
        return heads

    async def _delete(self, client: Redis, keys: Sequence[bytes]) -> None:
        async with client.pipeline(transaction=True) as commands:
            commands.delete(*self._names(keys))
            commands.zrem(self._use, *keys)
            await commands.execute()

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [self._prefix + key for key in keys]


class _ServerFull(StoreError):
    """The server has no memory for it."""


def _times(names: Sequence[BlockName]) -> list[int]:
    return [TTL_SECONDS * 1000, *(DEPTH_MICROS * name.depth for name in names)]
