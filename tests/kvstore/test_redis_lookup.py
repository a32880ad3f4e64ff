"""A lookup answered by Redis is right whatever the caller guesses."""

import asyncio
import os
import signal
from random import Random

import pytest
import redis.asyncio

from kvstore import redis_lookup
from kvstore.redis_keys import RedisKeys
from kvstore.redis_lookup import DirectLookup
from tests.kvstore.simulated import chain, until
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
            for _ in range(60):
                asked = keys[: rng.randint(1, 50)]
                expected = {each: min(depth, len(asked)) for each, depth in held.items()} | {"stranger": 0}
                near = {each: max(0, depth + rng.choice([-3, -1, 0, 0, 1, 9])) for each, depth in held.items()}
                for guesses in ({}, expected, near, {"stranger": 4}):
                    assert await lookup.lookup(client, names, asked, list(expected), guesses) == expected
            await lookup.close()


async def test_a_connection_that_the_server_closed_is_opened_again() -> None:
    """Servers close what is idle; nobody is to notice. So is that of another client's."""
    names, keys, lookup = RedisKeys(os.urandom(32)), chain(3), DirectLookup(30.0)
    with Server() as server:
        async with redis.asyncio.Redis.from_url(server.url, protocol=2) as client:
            await client.hset(names.worker("w"), "incarnation", "7")
            await client.sadd(names.blocks("w", 7), *[key[:16] for key in keys[:2]])
            for num_open in (2, 1, 1):  # the client's, which is not used again, and one of ours
                found = await asyncio.gather(*(lookup.lookup(client, names, keys, ["w"], {}) for _ in range(5)))
                assert found == [{"w": 2}] * 5
                assert server.command("CLIENT", "KILL", "TYPE", "normal") == num_open
                await until(lambda: lookup._link is not None and lookup._link.is_lost)
            async with redis.asyncio.Redis.from_url(server.url, protocol=2) as other:
                assert await lookup.lookup(other, names, keys, ["w"], {}) == {"w": 2}
            await lookup.close()


async def test_after_a_failure_the_connection_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between may have dropped the old one without a word: it would answer nothing for minutes."""
    monkeypatch.setattr(redis_lookup, "_PAUSE_SECONDS", 0.0)
    names, keys, lookup = RedisKeys(os.urandom(32)), chain(3), DirectLookup(0.5)
    with Server() as server:
        async with redis.asyncio.Redis.from_url(server.url, protocol=2) as client:
            assert await lookup.lookup(client, names, keys, ["w"], {}) == {"w": 0}
            os.kill(server.pid, signal.SIGSTOP)
            try:
                assert await lookup.lookup(client, names, keys, ["w"], {}) is None
            finally:
                os.kill(server.pid, signal.SIGCONT)
            server.command("CONFIG", "RESETSTAT")
            assert await lookup.lookup(client, names, keys, ["w"], {}) == {"w": 0}
            assert (await client.info("stats"))["total_connections_received"] == 2  # this one's and the client's
            await lookup.close()
