"""A script that the server keeps: sent once, then called by its digest."""

import hashlib
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from kvstore.redis_connection import result


class RedisScript:
    """Lua with KEYS and ARGV; all that it does happens at one moment, or (raised before its first write) not at all."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def run(self, redis: Redis, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Its answer, in one round trip once the server knows it."""
        try:
            return await result(redis.evalsha(self._digest, len(keys), *keys, *arguments))
        except NoScriptError:
            return await result(redis.eval(self._text, len(keys), *keys, *arguments))
