"""A script that the server keeps: sent once, then called by its digest."""

import hashlib
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from kvstore.redis_link import RedisLink


class RedisScript:
    """Lua with KEYS and ARGV; all that it does happens at one moment, or (raised before its first write) not at all."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def run(self, redis: Redis | RedisLink, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Its answer, in one round trip once the server knows it."""
        words = (len(keys), *keys, *arguments)
        try:
            return await redis.execute_command("EVALSHA", self._digest, *words)
        except NoScriptError:
            return await redis.execute_command("EVAL", self._text, *words)
