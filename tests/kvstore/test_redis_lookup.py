"""A lookup answered by Redis is right whatever the caller guesses."""

import os
from random import Random

import redis.asyncio

from kvstore.redis_keys import RedisKeys
from kvstore.redis_link import RedisLink
from kvstore.redis_lookup import DirectLookup
from tests.kvstore.simulated import chain
from tests.valkey import Server


async def test_guesses_change_no_answer() -> None:
    rng, names, keys = Random(0), RedisKeys(os.urandom(32)), chain(50)
    held = {f"w:{number} ü": rng.choice([0, 1, 2, 49, 50, rng.randrange(51)]) for number in range(20)}
    lookup = DirectLookup(30.0)
    with Server() as server:
        async with redis.asyncio.Redis.from_url(server.url, protocol=2) as client:
            for worker_id, depth in held.items():
                await client.hset(names.worker(worker_id), "incarnation", "7")
                if depth:
                    await client.sadd(names.blocks(worker_id, 7), *[key[:16] for key in keys[:depth]])
            link = await RedisLink.open(client)
            for _ in range(60):
                asked = keys[: rng.randint(1, 50)]
                expected = {each: min(depth, len(asked)) for each, depth in held.items()} | {"stranger": 0}
                near = {each: max(0, depth + rng.choice([-3, -1, 0, 0, 1, 9])) for each, depth in held.items()}
                for guesses in ({}, expected, near, {"stranger": 4}):
                    assert await lookup.lookup(link, names, asked, list(expected), guesses) == expected
            await link.close()
