"""A lookup answered by Redis itself: a search on the server, one round trip, a budget, and a pause after a failure."""

import asyncio
import logging
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from kvstore.background import within
from kvstore.redis_connection import CONNECTION_ERRORS
from kvstore.redis_keys import INDEX_KEY_BYTES, RedisKeys, index_keys
from kvstore.redis_link import RedisLink
from kvstore.redis_script import RedisScript

logger = logging.getLogger(__name__)

# What a worker holds is prefix-closed, so "holds keys[i]" is true up to the depth and false from there on. Where the
# caller guesses a depth, that key and the next are asked for first: one question if it is right, and ten of 512 keys
# if not. The others begin with the first key: most workers have nothing of a prompt.
# One piece each, as a client spends more on 70 arguments than the server on the search. KEYS: one of the slot that has
# them all. ARGV: names of the workers' hashes and sets up to the id, the 16-byte keys, the ids, then their lengths
# and the guesses as u32.
_SCRIPT = RedisScript("""
local call, sub, floor, min, unpack_u32 = redis.call, string.sub, math.floor, math.min, struct.unpack
local hashes, sets, blob, ids, lengths, guesses = unpack(ARGV)
local num_keys, first, depths = #blob / 16, 1, {}
for w = 1, #lengths / 4 do
  local length, guess = unpack_u32('<I4', lengths, 4 * w - 3), unpack_u32('<I4', guesses, 4 * w - 3)
  local id = sub(ids, first, first + length - 1)
  local incarnation = call('HGET', hashes .. id, 'incarnation')
  local blocks = sets .. id .. ':' .. (incarnation or '')
  local low, high = 0, incarnation and num_keys or 0
  guess = min(guess, high)
  if guess > 0 then
    local at, after = sub(blob, 16 * guess - 15, 16 * guess), sub(blob, 16 * guess + 1, 16 * guess + 16)
    local holds = call('SMISMEMBER', blocks, at, after)
    if holds[1] == 0 then
      high = guess - 1
    elseif holds[2] == 0 then
      low, high = guess, guess
    else
      low = guess + 1
    end
  elseif high > 0 then
    if call('SISMEMBER', blocks, sub(blob, 1, 16)) == 1 then low = 1 else high = 0 end
  end
  while low < high do
    local middle = floor((low + high + 1) / 2)
    if call('SISMEMBER', blocks, sub(blob, 16 * middle - 15, 16 * middle)) == 1 then
      low = middle
    else
      high = middle - 1
    end
  end
  depths[w], first = low, first + length
end
return depths
""")

_PAUSE_SECONDS = 1.0


class DirectLookup:
    """Runs the script. After a failure it answers None at once for a second, so that a slow Redis costs little.

    Its connection is opened by the first lookup, and anew when it has failed, was lost or belongs to another client;
    `close` at the end.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._paused_until = 0.0
        self._link: RedisLink | None = None
        self._client: Redis | None = None  # that the link is of
        self._opening = asyncio.Lock()

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    def _open_link(self, redis: Redis) -> RedisLink | None:
        is_usable = self._link is not None and not self._link.is_lost and self._client is redis
        return self._link if is_usable else None

    async def _open(self, redis: Redis) -> RedisLink:
        async with self._opening:
            link = self._open_link(redis)
            if link is None:
                await self.close()
                link = self._link = await RedisLink.open(redis)
                self._client = redis
            return link

    async def lookup(
        self,
        redis: Redis,
        names: RedisKeys,
        keys: Sequence[bytes],
        worker_ids: Sequence[str],
        guesses: Mapping[str, int],
    ) -> dict[str, int] | None:
        """Hit depth in blocks by worker id, or None if Redis did not answer in time. Right guesses make it faster."""
        now = asyncio.get_running_loop().time()
        if now < self._paused_until:
            return None
        if not worker_ids or not keys:
            return dict.fromkeys(worker_ids, 0)
        ids = [worker_id.encode() for worker_id in worker_ids]
        expected = [guesses.get(worker_id, 0) for worker_id in worker_ids]
        numbers = struct.Struct(f"<{len(ids)}I")
        blob = b"".join(keys if len(keys[0]) == INDEX_KEY_BYTES else index_keys(keys))
        arguments: list[Any] = [names.worker(""), names.blocks_prefix, blob, b"".join(ids)]
        arguments += [numbers.pack(*map(len, ids)), numbers.pack(*expected)]
        try:
            link = self._open_link(redis)
            if link is None:
                link = await within(self._timeout, self._open(redis))
            async with asyncio.timeout(self._timeout):
                depths = await _SCRIPT.run(link, [names.workers], arguments)
        except CONNECTION_ERRORS as error:
            logger.debug("no direct lookup for %g s: %r", _PAUSE_SECONDS, error)
            self._paused_until = asyncio.get_running_loop().time() + _PAUSE_SECONDS
            await self.close()  # what lies between may have dropped it without a word
            return None
        return dict(zip(worker_ids, depths, strict=True))
