"""A worker's entry in Redis: each write happens once, whole, and only where the entry stands as it was left."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio
from redis.exceptions import OutOfMemoryError

from kvstore.change_buffer import Change
from kvstore.redis_entry import LostWritesError, SupersededError, WorkerEntry
from kvstore.redis_keys import RedisKeys
from kvstore.redis_script import RedisScript
from kvstore.registry import WorkerRecord
from tests.valkey import PROGRAMS, Server, is_installed

ROOT = b"r" * 32
NAMES = RedisKeys(ROOT)
KEYS = [bytes([i // 256, i % 256]).rjust(16, b"k") for i in range(3000)]
SET, HASH = NAMES.blocks("w", 7), NAMES.worker("w")


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[dict[str, Server]]:
    """Started before any test looks at processes."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(Server(name)) for name in PROGRAMS if is_installed(name)}


@pytest_asyncio.fixture(params=PROGRAMS)
async def client(request: pytest.FixtureRequest, servers: dict[str, Server]) -> AsyncIterator[Any]:
    if request.param not in servers:
        pytest.skip(f"{request.param} is not installed")
    async with redis.asyncio.Redis.from_url(servers[request.param].url, protocol=2) as client:
        await client.flushall()
        await client.script_flush()
        yield client
        await client.config_set("maxmemory", 0)


async def an_entry(client: Any) -> WorkerEntry:
    """Registered, with the first ten keys."""
    entry = WorkerEntry(WorkerRecord("w", "host:1", "decode", 7, root=ROOT), NAMES, 30.0, 10_000)
    await entry.register(client)
    await entry.write(client, stores(*KEYS[:10]))
    return entry


def stores(*keys: bytes, removed: tuple[bytes, ...] = (), cleared: bool = False) -> Change:
    return Change(cleared, removed, keys)


async def all_of_it(client: Any) -> tuple[set[bytes], dict[bytes, bytes], list[Any]]:
    return await client.smembers(SET), await client.hgetall(HASH), await client.xrange(NAMES.events)


async def test_set_seq_and_event_change_together(client: Any) -> None:
    entry = await an_entry(client)
    await entry.write(client, stores(*KEYS[10:], removed=tuple(KEYS[:4])))
    held, fields, events = await all_of_it(client)
    assert held == set(KEYS[4:])
    assert (fields[b"seq"], entry.record.seq) == (b"3", 3)
    last = events[-1][1]
    assert (last[b"seq"], last[b"tier"], last[b"worker"]) == (b"3", b"device", b"w")
    assert (last[b"removed"], last[b"stored"]) == (b"".join(KEYS[:4]), b"".join(KEYS[10:]))
    await entry.write(client, stores(KEYS[0], cleared=True))
    held, _, events = await all_of_it(client)
    assert (held, events[-1][1][b"cleared"], len(events)) == ({KEYS[0]}, b"1", 4)
    assert b"removed" not in events[-1][1]
    assert 50_000 < await client.pttl(SET) <= 60_000


async def test_a_write_whose_answer_was_lost_happens_once(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entry, run = await an_entry(client), RedisScript.run
    change = stores(KEYS[10], removed=(KEYS[0],))

    async def lose_the_answer(*arguments: Any) -> Any:
        await run(*arguments)
        raise ConnectionError("it broke before the answer")

    monkeypatch.setattr(RedisScript, "run", lose_the_answer)
    with pytest.raises(ConnectionError):
        await entry.write(client, change)
    monkeypatch.undo()
    before = await all_of_it(client)
    await entry.write(client, change)
    assert await all_of_it(client) == before, "the second time it must do nothing"
    assert entry.record.seq == 3
    await entry.write(client, stores(KEYS[11]))
    held, _, events = await all_of_it(client)
    assert (held, len(events)) == (set(KEYS[1:12]), 4)


@pytest.mark.parametrize(
    ("what", "expected"),
    [("seq", LostWritesError), ("generation", LostWritesError), ("incarnation", SupersededError)],
)
async def test_where_something_else_stands_nothing_changes(client: Any, what: str, expected: type[Exception]) -> None:
    """A server that was put back, a registration of our own that we have not heard of, another process."""
    entry = await an_entry(client)
    await client.hset(HASH, what, "1" if what == "seq" else "9")
    before = await all_of_it(client)
    with pytest.raises(expected):
        await entry.write(client, stores(KEYS[10], cleared=True))
    assert await all_of_it(client) == before


async def test_an_entry_that_is_gone_stays_gone(client: Any) -> None:
    entry = await an_entry(client)
    await client.flushall()
    with pytest.raises(LostWritesError):
        await entry.write(client, stores(KEYS[10]))
    assert await client.keys("*") == []


async def test_a_server_short_of_memory_refuses_all_of_it(client: Any) -> None:
    entry = await an_entry(client)
    before = await all_of_it(client)
    change = stores(KEYS[10], removed=(KEYS[0],), cleared=True)
    await client.config_set("maxmemory-policy", "noeviction")
    await client.config_set("maxmemory", 1)
    with pytest.raises(OutOfMemoryError):
        await entry.write(client, change)
    await client.config_set("maxmemory", 0)
    assert await all_of_it(client) == before
    await entry.write(client, change)
    held, _, events = await all_of_it(client)
    assert (held, len(events), entry.record.seq) == ({KEYS[10]}, 3, 3)


async def test_a_set_that_shrank_behind_our_back_is_noticed(client: Any) -> None:
    entry = await an_entry(client)
    await client.srem(SET, KEYS[5])
    with pytest.raises(LostWritesError, match="9 blocks where 10"):
        await entry.write(client, stores(KEYS[10]))
