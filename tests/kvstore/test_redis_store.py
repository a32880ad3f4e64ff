"""A block store on real servers: bounded, atomic, in nobody's way; whatever the server does, it is one error."""

import asyncio
import itertools
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from kvstore.block_store import BlockName, StoreError
from kvstore.redis_connection import RedisTarget
from kvstore.redis_store import UNBOOKED_SECONDS, RedisBlockStore, stored_bytes
from tests.kvstore.simulated import until
from tests.valkey import PROGRAMS, Server, is_installed

pytestmark = pytest.mark.timeout(180)

FLEET, OTHER = b"f" * 32, b"o" * 32


def name(number: int, depth: int = 0) -> BlockName:
    return BlockName(number.to_bytes(32, "little"), depth)


def chain(first: int, num_blocks: int) -> list[BlockName]:
    return [name(first + i, i) for i in range(num_blocks)]


@asynccontextmanager
async def connected(
    server: Server, max_blocks: int = 8, fleets: tuple[bytes, ...] = (FLEET,)
) -> AsyncIterator[list[RedisBlockStore]]:
    stores = [RedisBlockStore(RedisTarget.parse(server.url), fleet, max_blocks) for fleet in fleets]
    yield stores
    for store in stores:
        await store.close()


def values_of(names: list[BlockName], size: int = 40) -> list[tuple[BlockName, bytes]]:
    return [(each, each.key[:1] * size) for each in names]


async def keys_in(store: RedisBlockStore) -> set[int]:
    found, cursor = set(), 0
    while True:
        page = await store.heads(cursor, 4)
        found |= {int.from_bytes(key, "little") for key, _ in page.heads}
        assert all(head in (key[:1] * 4, b"xxxx") for key, head in page.heads)
        if not (cursor := page.next_cursor):
            return found


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_fleet_shares_what_another_does_not_see(program: str) -> None:
    if not is_installed(program):
        pytest.skip(f"{program} is not installed")
    with Server(program) as server:
        async with connected(server, fleets=(FLEET, FLEET, OTHER)) as (mine, yours, foreign):
            stored = await mine.put(values_of(chain(1, 3)))
            assert (stored.num_blocks, stored.num_evicted) == (3, 0)
            assert await yours.touch(chain(1, 5)) == [True, True, True, False, False]
            assert await yours.get([name(2).key, name(9).key]) == [b"\2" * 40, None]
            assert await foreign.touch(chain(1, 3)) == [False] * 3
            assert await foreign.get([name(1).key]) == [None]
            await yours.delete([name(2).key])
            assert await keys_in(mine) == {1, 3}
            assert await keys_in(foreign) == set()


@pytest.mark.parametrize("program", PROGRAMS)
async def test_it_never_holds_more_and_the_longest_unused_go(program: str) -> None:
    if not is_installed(program):
        pytest.skip(f"{program} is not installed")
    with Server(program) as server:
        async with connected(server, fleets=(FLEET, OTHER)) as (store, foreign):
            server.command("SET", "pw:{index}", "stays")
            await foreign.put(values_of(chain(100, 8)))
            for number in range(1, 9):
                await store.put(values_of([name(number)]))
            await store.touch([name(1), name(2)])
            stored = await store.put(values_of([name(21), name(22)]))
            assert (stored.num_blocks, stored.num_evicted) == (8, 2)
            assert await keys_in(store) == {1, 2, 5, 6, 7, 8, 21, 22}
            stored = await store.put(values_of([name(21), name(22)]))
            assert (stored.num_blocks, stored.num_evicted) == (8, 0)
            await store.put(values_of(chain(1, 8)))
            await store.put(values_of([name(31), name(32)]))
            assert await keys_in(store) == {1, 2, 3, 4, 5, 6, 31, 32}, "of a chain the end goes first"
            assert await keys_in(foreign) == set(range(100, 108))
            assert server.command("GET", "pw:{index}") == b"stays"
            assert server.command("PTTL", b"pwkv:{%b}:%b" % (FLEET[:16].hex().encode(), name(1).key)) > 0


async def test_books_and_values_agree_after_a_random_history() -> None:
    rng = random.Random(3)
    with Server() as server:
        async with connected(server, 12, (FLEET, FLEET)) as stores:
            for _ in range(120):
                store, names = rng.choice(stores), chain(100 * rng.randrange(3) + 1, rng.randrange(1, 7))
                match rng.randrange(4):
                    case 0:
                        await store.touch(names)
                    case 1:
                        await store.delete([each.key for each in names])
                    case _:
                        await store.put(values_of(names))
                booked = server.command("ZRANGE", b"pwkv:{%b}:use" % FLEET[:16].hex().encode(), 0, -1)
                assert isinstance(booked, list)
                assert {int.from_bytes(key, "little") for key in booked} == await keys_in(store)
                assert len(booked) <= 12


async def test_a_full_server_loses_only_our_own_blocks() -> None:
    """CASES F12: maxmemory without eviction; what others have there stays."""
    limits = ("--maxmemory", "14mb", "--maxmemory-policy", "noeviction")
    with Server(arguments=limits) as server:
        async with connected(server, 1000) as (store,):
            for number in range(10):
                await store.put(values_of([name(number + 1)], 2_000_000))
            assert 2 <= len(await keys_in(store)) <= 6, "it goes on with the room that there is"
            assert await store.get([name(10).key]) == [b"\x0a" * 2_000_000]
            server.command("FLUSHALL")
            num_theirs = server.fill(500_000)
            with pytest.raises(StoreError, match=r"the store at redis://.*command not allowed"):
                await store.put(values_of(chain(1, 3), 4_000_000))
            assert await store.touch(chain(1, 3)) == [False] * 3
            assert server.command("DBSIZE") == num_theirs


async def test_a_server_that_is_gone_is_an_error_until_it_is_back() -> None:
    with Server() as server:
        async with connected(server) as (store,):
            await store.put(values_of(chain(1, 2)))
            server.kill()
            for _ in range(2):
                with pytest.raises(StoreError, match="the store at redis://"):
                    await store.get([name(1).key])
            server.restart()
            assert await store.get([name(1).key]) == [None]
            assert (await store.put(values_of(chain(1, 2)))).num_blocks == 2


async def test_calls_at_once_share_one_client_also_after_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind Sentinel or on a cluster, where connecting asks somebody first."""
    num_connects = 0
    connect = RedisTarget.connect

    async def connects(target: RedisTarget, key: str, timeout: float) -> Redis:
        nonlocal num_connects
        num_connects += 1
        await asyncio.sleep(0.01)
        return await connect(target, key, timeout)

    monkeypatch.setattr(RedisTarget, "connect", connects)
    with Server() as server:
        async with connected(server) as (store,):
            for number in (1, 2):
                found = await asyncio.gather(*(store.get([name(1).key]) for _ in range(8)))
                assert found == [[None]] * 8
                assert num_connects == number
                server.kill()
                found = await asyncio.gather(*(store.get([name(1).key]) for _ in range(8)), return_exceptions=True)
                assert {type(each) for each in found} == {StoreError}
                assert num_connects == number
                server.restart()


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_value_takes_no_more_than_is_counted(program: str) -> None:
    """Debian's server has jemalloc, which takes up to a quarter more than the bytes."""
    if not is_installed(program):
        pytest.skip(f"{program} is not installed")
    sizes = [1500, 70_000, 1 << 20, (1 << 20) + 1136, 1_500_000]
    with Server(program) as server:
        async with connected(server) as (store,):
            for number, size in enumerate(sizes):
                await store.put([(name(number), b"x" * size)])
                key = b"pwkv:{%b}:%b" % (FLEET[:16].hex().encode(), name(number).key)
                taken = server.command("MEMORY", "USAGE", key)
                assert isinstance(taken, int)
                assert size < taken <= stored_bytes(size) < 1.25 * size + 1024


ACL = (
    "~pwkv:*", "+eval", "+time", "+pexpire", "+zadd", "+zrem", "+zcard", "+zpopmin", "+del", "+set", "+mget", "+scan",
    "+getrange", "+multi", "+exec", "+select",
)  # fmt: skip
"""What docs/tiers.md says that a user of the store needs."""


@pytest.mark.parametrize("program", PROGRAMS)
async def test_what_cannot_be_booked_does_not_stay(program: str) -> None:
    """A user who may not evict would else fill the server."""
    if not is_installed(program):
        pytest.skip(f"{program} is not installed")
    with Server(program) as server:
        server.command("ACL", "SETUSER", "all", "on", ">pw", *ACL)
        server.command("ACL", "SETUSER", "some", "on", ">pw", *ACL, "-zpopmin")
        server.command("ACL", "SETUSER", "few", "on", ">pw", *ACL, "-zpopmin", "-del")
        url = f"redis://{{}}:pw@127.0.0.1:{server.port}/1"
        stores = [RedisBlockStore(RedisTarget.parse(url.format(user)), FLEET, 4) for user in ("all", "some", "few")]
        most, some, few = stores
        for start in (1, 11):
            assert (await most.put(values_of(chain(start, 4)))).num_blocks == 4
        assert await most.touch(chain(11, 4)) == [True] * 4
        with pytest.raises(StoreError, match=r"zpopmin|user executing the script can.t run this command"):
            await some.put(values_of(chain(21, 4)))
        assert await keys_in(most) == {11, 12, 13, 14}
        with pytest.raises(StoreError, match=r"zpopmin|user executing the script can.t run this command"):
            await few.put(values_of(chain(21, 4)))
        assert await most.get([name(21).key]) == [b"\x15" * 40]
        prefix = b"pwkv:{%b}:" % FLEET[:16].hex().encode()
        for number, least, longest in ((11, UNBOOKED_SECONDS, 86400), (21, 0, UNBOOKED_SECONDS)):
            ttl = await _ttl(f"{server.url}/1", prefix + name(number).key)
            assert least < ttl <= longest
        await most.delete([name(number).key for number in range(1, 30)])
        assert await keys_in(most) == set()
        for store in stores:
            await store.close()


async def _ttl(url: str, name: bytes) -> int:
    async with Redis.from_url(url) as client:
        return int(await client.ttl(name))


async def test_what_is_no_value_of_ours_is_an_error_or_not_seen() -> None:
    with Server() as server:
        async with connected(server) as (store,):
            prefix = b"pwkv:{%b}:" % FLEET[:16].hex().encode()
            server.command("LPUSH", prefix + name(1).key, "a list")
            server.command("SET", prefix + b"short", "another's")
            assert await keys_in(store) == set()
            assert await store.get([name(1).key]) == [None]
            server.command("SET", prefix + b"use", "no books")
            with pytest.raises(StoreError, match="WRONGTYPE"):
                await store.put(values_of(chain(2, 1)))


WRITER = """
import asyncio, sys
from kvstore.redis_connection import RedisTarget
from kvstore.redis_store import RedisBlockStore
from kvstore.block_store import BlockName
async def main():
    store = RedisBlockStore(RedisTarget.parse(sys.argv[1]), b"f" * 32, 40)
    print("ready", flush=True)
    for number in range(1, 1 << 30):
        await store.put([(BlockName((8 * number + i).to_bytes(32, "little"), i), b"x" * (1 << 20)) for i in range(4)])
asyncio.run(main())
"""


def _write_and_be_killed(url: str, after_seconds: float) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, url], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline(), "the writer did not start"
        time.sleep(after_seconds)
        writer.send_signal(signal.SIGKILL)


def _num_clients(server: Server) -> int:
    clients = server.command("CLIENT", "LIST", "TYPE", "normal")
    assert isinstance(clients, bytes)
    return clients.count(b"\n")


async def test_a_writer_killed_in_the_middle_leaves_whole_values() -> None:
    """CASES F12: what it had sent in part is not there at all, nor booked."""
    rng = random.Random(7)
    with Server() as server:
        async with connected(server, 40) as (store,):
            await store.touch([name(1)])
            keys: list[bytes] = []
            for number in itertools.count():
                if number >= 3 and len(keys) >= 4:
                    break
                _write_and_be_killed(server.url, rng.uniform(0.05, 0.3))
                await until(lambda: _num_clients(server) == 2)  # the server has done what it had got from it
                keys = [stored.to_bytes(32, "little") for stored in sorted(await keys_in(store))]
                assert all(value == b"x" * (1 << 20) for value in await store.get(keys))
                booked = server.command("ZCARD", b"pwkv:{%b}:use" % FLEET[:16].hex().encode())
                assert booked == len(keys) <= 40
