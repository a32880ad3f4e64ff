"""The index knows in which tier a worker's blocks lie; after whatever happened, every view equals every tier."""

import os
from collections.abc import AsyncIterator
from random import Random

import pytest
import pytest_asyncio

from kvstore.events import CacheEvent, Tier
from kvstore.redis_index import RedisIndex
from kvstore.redis_keys import index_keys
from kvstore.redis_publisher import Publisher
from kvstore.registry import WorkerRecord
from tests.kvstore.simulated import chain, crash
from tests.valkey import Server

pytestmark = pytest.mark.timeout(120)
TIERS: tuple[Tier, ...] = ("device", "host", "disk")


class Worker:
    """Blocks in three tiers and a publisher that says so."""

    def __init__(self, url: str, root: bytes, worker_id: str, **options: int) -> None:
        self.worker_id = worker_id
        self.held: dict[Tier, dict[bytes, None]] = {tier: {} for tier in TIERS}
        record = WorkerRecord(worker_id, "127.0.0.1:1", "prefill", int.from_bytes(os.urandom(7), "big"), capacity=64)
        self.publisher = Publisher(
            url,
            record,
            root,
            lambda: list(self.held["device"]),
            lower_snapshot=lambda: {tier: list(self.held[tier]) for tier in TIERS[1:]},
            **options,
        )

    def store(self, tier: Tier, keys: list[bytes]) -> None:
        self.held[tier] |= dict.fromkeys(keys)
        self.publisher.publish([CacheEvent("stored", tuple(keys), tier)])

    def remove(self, tier: Tier, keys: list[bytes]) -> None:
        for key in keys:
            del self.held[tier][key]
        self.publisher.publish([CacheEvent("removed", tuple(keys), tier)])

    def clear(self, tier: Tier) -> None:
        self.held[tier].clear()
        self.publisher.publish([CacheEvent("cleared", tier=tier)])


class World:
    """A server, a view and workers."""

    def __init__(self, server: Server) -> None:
        self.server, self.root = server, os.urandom(32)
        self.index = RedisIndex(server.url, self.root, poll_seconds=0.05)
        self.workers: dict[str, Worker] = {}

    async def start(self, worker_id: str, **options: int) -> Worker:
        worker = self.workers[worker_id] = Worker(self.server.url, self.root, worker_id, **options)
        await worker.publisher.start()
        return worker

    async def settle(self) -> None:
        for worker in self.workers.values():
            await worker.publisher.quiesce(60.0)
        await self.index.quiesce(60.0)

    def check_equal(self) -> None:
        for name, worker in self.workers.items():
            assert self.index.blocks(name) == set(index_keys(worker.held["device"]))
            for tier in TIERS[1:]:
                assert self.index.lower_blocks(tier, name) == set(index_keys(worker.held[tier])), tier


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    with Server() as server:
        world = World(server)
        await world.index.start()
        yield world
        for worker in world.workers.values():
            await worker.publisher.stop()
        await world.index.stop()


async def test_a_lookup_says_what_lies_where(world: World) -> None:
    worker, prompt = await world.start("w"), chain(8)
    await world.settle()
    assert world.index.lookup_lower(prompt) == {}
    worker.store("device", prompt[:3])
    worker.store("host", prompt[:5])
    worker.store("disk", prompt)
    worker.remove("device", prompt[2:3])
    await world.settle()
    assert world.index.lookup(prompt) == {"w": 2}
    assert world.index.lookup_lower(prompt) == {"host": {"w": 5}, "disk": {"w": 8}}
    worker.clear("host")
    await world.settle()
    assert world.index.lookup_lower(prompt) == {"disk": {"w": 8}}


async def test_a_new_life_begins_with_nothing_in_any_tier(world: World) -> None:
    """CASES C1, C2."""
    worker, prompt = await world.start("w"), chain(4)
    for tier in TIERS:
        worker.store(tier, prompt)
    await world.settle()
    await crash(worker.publisher)
    await world.start("w")
    await world.settle()
    assert world.index.lookup(prompt) == {"w": 0}
    assert world.index.lookup_lower(prompt) == {}
    world.check_equal()


async def test_random_histories_end_equal(world: World) -> None:
    """CASES C5, C11: evictions, clears, overflows, lost sets and a server that forgets everything."""
    rng = Random(11)
    for name in ("a", "b"):
        await world.start(name, max_buffered_keys=400, lease_seconds=2)
    for step in range(120):
        worker, tier = world.workers[rng.choice("ab")], rng.choice(TIERS)
        held = list(worker.held[tier])
        if rng.random() < 0.7 or not held:
            worker.store(tier, chain(rng.choice([1, 5, 60, 600])))
        elif rng.random() < 0.9:
            worker.remove(tier, held[-rng.randint(1, len(held)) :])
        else:
            worker.clear(tier)
        if step % 40 == 20:
            await world.settle()
            world.check_equal()
        if step in (50, 90):
            world.server.command("FLUSHALL")
    await world.settle()
    world.check_equal()
