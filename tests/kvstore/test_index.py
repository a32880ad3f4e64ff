"""One behaviour suite for every index backend: in memory, embedded Valkey, redis-server when installed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from random import Random

import pytest
import pytest_asyncio
import redis.asyncio

from kvstore.redis_keys import RedisKeys
from tests.kvstore.simulated import Backend, CacheOf, MemoryBackend, RedisBackend, chain, check_equal
from tests.valkey import PROGRAMS, Server, is_installed

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[dict[str, Server]]:
    """One server of each kind; the tests keep apart by their roots. Started before any test looks at processes."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(Server(name)) for name in PROGRAMS if is_installed(name)}


@pytest_asyncio.fixture(params=["memory", *PROGRAMS])
async def backend(request: pytest.FixtureRequest, servers: dict[str, Server]) -> AsyncIterator[Backend]:
    if request.param != "memory" and request.param not in servers:
        pytest.skip(f"{request.param} is not installed")
    backend: Backend = MemoryBackend() if request.param == "memory" else RedisBackend(servers[request.param].url)
    await backend.index.start()
    yield backend
    await backend.close()


async def test_depth_is_the_number_of_leading_blocks_held(backend: Backend) -> None:
    prompt = chain(6)
    for worker_id, held in (("all", prompt), ("four", prompt[:4]), ("none", []), ("one", prompt[:1])):
        await backend.worker(worker_id, held)
    await backend.settle()
    expected = {"all": 6, "four": 4, "none": 0, "one": 1}
    assert backend.index.lookup(prompt) == expected
    assert backend.index.lookup([key[:16] for key in prompt]) == expected
    assert backend.index.lookup(prompt, ["four", "stranger"]) == {"four": 4, "stranger": 0}
    assert backend.index.lookup(prompt, []) == {}
    assert backend.index.lookup([], ["all"]) == {"all": 0}


async def test_stored_removed_cleared(backend: Backend) -> None:
    worker, prompt = await backend.worker("w"), chain(5)
    worker.store(prompt)
    assert await backend.depths(prompt) == {"w": 5}
    worker.evict(prompt[3:])
    assert await backend.depths(prompt) == {"w": 3}
    worker.store(prompt[3:4])
    assert await backend.depths(prompt) == {"w": 4}
    worker.clear()  # C4: an idle worker's reset arrives, although nothing follows it
    assert await backend.depths(prompt) == {"w": 0}
    check_equal(backend)


async def test_events_given_at_once_keep_their_order(backend: Backend) -> None:
    worker, prompt = await backend.worker("w"), chain(4)
    await backend.settle()  # registered: from here on events count, not the snapshot
    worker.store(prompt)
    worker.evict(prompt[2:])
    worker.store(prompt[2:])
    worker.clear()
    worker.store(prompt[:3])
    worker.evict(prompt[2:3])
    worker.store(prompt[2:3])
    assert await backend.depths(prompt) == {"w": 3}
    check_equal(backend)


async def test_a_worker_that_registers_brings_what_it_holds(backend: Backend) -> None:
    prompt = chain(3000)  # more than one piece
    await backend.worker("w", prompt)
    assert await backend.depths(prompt) == {"w": 3000}
    check_equal(backend)


@pytest.mark.parametrize("clean", [True, False])
async def test_a_new_incarnation_voids_the_old(backend: Backend, clean: bool) -> None:
    """C1, C2, C7: same name, new process; its sequence numbers start anew and its cache is empty."""
    worker, prompt = await backend.worker("w"), chain(8)
    for key in prompt:
        worker.store([key])
    assert await backend.depths(prompt) == {"w": 8}
    await worker.restart(clean=clean)
    assert await backend.depths(prompt) == {"w": 0}
    worker.store(prompt[:1])
    assert await backend.depths(prompt) == {"w": 1}
    check_equal(backend)
    if isinstance(backend, RedisBackend):
        names = RedisKeys(backend.root)
        current = {names.worker("w").encode(), names.blocks("w", worker.record.incarnation).encode()}
        assert set(await _keys_with(backend, "w")) == current


async def test_deregistering_leaves_nothing(backend: Backend) -> None:
    worker, other, prompt = await backend.worker("w"), await backend.worker("other"), chain(3)
    worker.store(prompt)
    other.store(prompt[:1])
    await backend.settle()
    await worker.publisher.stop()
    backend.workers.remove(worker)
    assert await backend.depths(prompt) == {"other": 1}
    check_equal(backend)
    if isinstance(backend, RedisBackend):
        server_keys = await _keys_with(backend, "w")
        assert server_keys == []


async def _keys_with(backend: RedisBackend, worker_id: str) -> list[bytes]:
    async with redis.asyncio.Redis.from_url(backend.url) as client:
        prefix = f"pw:{{{backend.root[:16].hex()}}}:"
        return [name async for name in client.scan_iter(f"{prefix}*:{worker_id}*")]


async def test_the_records_say_who_is_there(backend: Backend) -> None:
    worker = await backend.worker("w")
    await backend.settle()
    record = backend.index.workers()["w"]
    assert (record.endpoint, record.role, record.capacity) == (worker.record.endpoint, "prefill", 64)
    assert backend.index.state == "connected"


@pytest.mark.parametrize("seed", range(4))
async def test_random_walk_equals_the_model(backend: Backend, seed: int) -> None:
    """Stores, evictions, resets, deaths, duplicates and losses in any order: after a barrier the index is what the
    workers hold."""
    await _walk(backend, seed, num_steps=150, steps_per_barrier=50)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 103))
async def test_long_random_walk_equals_the_model(backend: Backend, seed: int) -> None:
    await _walk(backend, seed, num_steps=3000, steps_per_barrier=100)


async def _walk(backend: Backend, seed: int, *, num_steps: int, steps_per_barrier: int) -> None:
    rng = Random(seed)
    workers = [await backend.worker(f"w{n}") for n in range(3)]
    shared = chain(5)
    prompts = [shared[: rng.randrange(6)] + chain(7) for _ in range(4)]
    for step in range(num_steps):
        worker, prompt = rng.choice(workers), rng.choice(prompts)
        actions = ["store", "evict", "clear", "restart", "repeat", "lose"]
        await _act(rng.choices(actions, [50, 30, 4, 2, 4, 6])[0], backend, worker, prompt, prompts, rng)
        await asyncio.sleep(rng.choice([0, 0, 0.005]))
        if step % steps_per_barrier == steps_per_barrier - 1:
            await backend.heal()
            await backend.settle()
            check_equal(backend)
            for each in prompts:
                expected = {worker.worker_id: worker.depth(each) for worker in workers}
                assert await backend.depths(each) == expected


async def _act(
    action: str, backend: Backend, worker: CacheOf, prompt: list[bytes], prompts: list[list[bytes]], rng: Random
) -> None:
    depth = worker.depth(prompt)
    if action == "store" and depth < len(prompt):
        worker.store(prompt[depth : depth + rng.randint(1, 4)])
    elif action == "evict" and depth:
        # Whatever continues them goes first: holdings are prefix-closed.
        evicted = prompt[max(0, depth - rng.randint(1, 3)) : depth]
        tails = [key for each in prompts if evicted[0] in each for key in reversed(each[each.index(evicted[0]) :])]
        worker.evict([key for key in dict.fromkeys(tails) if key in worker.held])
    elif action == "clear":
        worker.clear()
    elif action == "restart":
        await worker.restart(clean=rng.random() < 0.5)
    elif action == "repeat" and depth:
        worker.store(prompt[:depth])  # a block that is computed twice is told twice
    elif action == "lose" and rng.random() < 0.3 and isinstance(backend, RedisBackend):
        await _repeat_events(backend, rng)
    elif action == "lose" and isinstance(backend, RedisBackend):
        await _lose(backend, worker, rng)


async def _repeat_events(backend: RedisBackend, rng: Random) -> None:
    """Old entries of the stream come again, as after a replay."""
    events = RedisKeys(backend.root).events
    async with redis.asyncio.Redis.from_url(backend.url, protocol=2) as client:
        for _, fields in await client.xrevrange(events, count=rng.randint(1, 3)):
            await client.xadd(events, fields)


async def _lose(backend: RedisBackend, worker: CacheOf, rng: Random) -> None:
    """What a failover does: the events are gone, the last writes are gone, or the entry is gone."""
    names = RedisKeys(backend.root)
    record = worker.record
    async with redis.asyncio.Redis.from_url(backend.url, protocol=2) as client:
        match rng.randrange(4):
            case 0:
                await client.xtrim(names.events, maxlen=0, approximate=False)
            case 1 if await client.exists(names.worker(record.worker_id)):
                await client.hincrby(names.worker(record.worker_id), "seq", -1)
            case 2:
                await client.delete(names.worker(record.worker_id))
            case 3:
                await client.spop(names.blocks(record.worker_id, record.incarnation), 1)
