"""Redis as a fault: gone, paused, flushed, full, read-only, failed over. No request waits for it, none fails, and
afterwards the index is what the workers hold (CASES C12; issue "nothing is lost", Redis)."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import redis

from pagewire import AsyncClient
from tests.chaos.oracle import Oracle, greedy, prompt, stream
from tests.chaos.proxy import Proxy
from tests.chaos.system import System
from tests.chaos.test_death import busy, until
from tests.ports import free_port
from tests.valkey import Server

NUM_PROMPTS = 24  # of 18 blocks each: more than a pool of 260 keeps, so holdings change all the time
NUM_TOKENS = 30
# A request takes a few hundred milliseconds here; the faults below last until all requests are through.
LONGEST_REQUEST = 10.0
HEAL_SECONDS = 90.0


@pytest.fixture(scope="module")
def work(oracle: Oracle) -> list[tuple[list[int], list[list[int]]]]:
    prompts = [prompt(40, 200 + number) for number in range(NUM_PROMPTS)]
    return [(ids, oracle(ids, **greedy(NUM_TOKENS))) for ids in prompts]


async def serve_all(client: AsyncClient, work: list[tuple[list[int], list[list[int]]]]) -> float:
    """Four at a time; every one right. Returns the longest that one took, seconds."""
    waiting = list(work)
    longest = 0.0

    async def one_after_the_other() -> None:
        nonlocal longest
        while waiting:
            ids, expected = waiting.pop()
            started = time.monotonic()
            assert (await stream(client, ids, **greedy(NUM_TOKENS))).outputs == expected
            longest = max(longest, time.monotonic() - started)

    await asyncio.gather(*(one_after_the_other() for _ in range(4)))
    return longest


def index_is_whole(system: System) -> bool:
    """The sets in Redis and the router's view both are what the workers hold."""
    try:
        if system._unquiet():
            return False
        status = system.router_status("r0")
    except redis.RedisError:
        return False
    held = sum(worker.num_cached_blocks for worker in status.workers)
    return status.index_state == "connected" and status.num_indexed_blocks == held


Hurt = Callable[[Server, Proxy], None]


def shut_down(server: Server, proxy: Proxy) -> None:
    with suppress(redis.ConnectionError):
        server.command("SHUTDOWN", "NOSAVE")


def start_again(server: Server, proxy: Proxy) -> None:
    server.kill()  # what is left of it
    server.restart()


def pause(server: Server, proxy: Proxy) -> None:
    server.command("CLIENT", "PAUSE", 60_000, "ALL")


def flush(server: Server, proxy: Proxy) -> None:
    server.command("FLUSHALL")


def fill(server: Server, proxy: Proxy) -> None:
    server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    server.command("CONFIG", "SET", "maxmemory", 1)


def make_room(server: Server, proxy: Proxy) -> None:
    server.command("CONFIG", "SET", "maxmemory", 0)


def follow_nobody(server: Server, proxy: Proxy) -> None:
    """A replica (whose primary does not exist) refuses writes: READONLY."""
    server.command("REPLICAOF", "127.0.0.1", free_port())


def lead(server: Server, proxy: Proxy) -> None:
    server.command("REPLICAOF", "NO", "ONE")


def freeze(server: Server, proxy: Proxy) -> None:
    proxy.freeze()


def cut_and_thaw(server: Server, proxy: Proxy) -> None:
    proxy.cut()
    proxy.thaw()


def nothing(server: Server, proxy: Proxy) -> None:
    pass


@pytest.mark.parametrize(
    ("hurt", "heal"),
    [
        pytest.param(shut_down, start_again, id="shut down and back, empty"),
        pytest.param(pause, start_again, id="paused, then restarted", marks=pytest.mark.nightly),
        pytest.param(flush, nothing, id="flushed", marks=pytest.mark.nightly),
        pytest.param(fill, make_room, id="out of memory", marks=pytest.mark.nightly),
        pytest.param(follow_nobody, lead, id="read-only", marks=pytest.mark.nightly),
        pytest.param(freeze, cut_and_thaw, id="cut off without a word"),
    ],
)
async def test_c12_redis_is_hurt_in_flight(
    system: System,
    client: AsyncClient,
    redis_server: Server,
    redis_proxy: Proxy,
    work: list[tuple[list[int], list[list[int]]]],
    hurt: Hurt,
    heal: Hurt,
) -> None:
    running = asyncio.ensure_future(serve_all(client, work[: NUM_PROMPTS // 2]))
    await until(lambda: busy(system, "d0", "d1"))
    await asyncio.to_thread(hurt, redis_server, redis_proxy)
    try:
        longest = max(await running, await serve_all(client, work))
    finally:
        # In this thread: a Valkey dies with the thread that started it.
        heal(redis_server, redis_proxy)
    assert longest < LONGEST_REQUEST
    started = time.monotonic()
    await until(lambda: index_is_whole(system), timeout=HEAL_SECONDS)
    print(f"the longest request took {longest:.2f} s, the index was whole after {time.monotonic() - started:.1f} s")
    # And it is of use again.
    ids, expected = work[0]
    again = await stream(client, ids, **greedy(NUM_TOKENS))
    assert again.outputs == expected


@asynccontextmanager
async def replica_of(primary: Server) -> AsyncIterator[Server]:
    primary.command("CONFIG", "SET", "repl-diskless-sync-delay", 0)
    with Server() as replica:
        replica.command("REPLICAOF", "127.0.0.1", primary.port)

        def is_in_step() -> bool:
            answer = replica.command("INFO", "replication")
            assert isinstance(answer, dict)
            return bool(answer["master_link_status"] == "up")

        await until(is_in_step)
        yield replica


async def test_a_replica_that_missed_writes_is_promoted(
    system: System,
    client: AsyncClient,
    redis_server: Server,
    redis_proxy: Proxy,
    work: list[tuple[list[int], list[list[int]]]],
) -> None:
    """Failover behind the same address; the new primary knows an older state of every worker."""
    await serve_all(client, work[:8])
    async with replica_of(redis_server) as replica:
        replica.command("REPLICAOF", "NO", "ONE")
        running = asyncio.ensure_future(serve_all(client, work))  # writes that the replica never sees
        await until(lambda: busy(system, "d0", "d1"))
        await asyncio.sleep(0.3)
        redis_proxy.target = f"127.0.0.1:{replica.port}"
        redis_proxy.cut()
        assert max(await running, await serve_all(client, work)) < LONGEST_REQUEST
        await until(lambda: index_is_whole(system), timeout=HEAL_SECONDS)
        # Back to the old primary, which is behind now: the same once more.
        redis_proxy.target = f"127.0.0.1:{redis_server.port}"
        redis_proxy.cut()
        assert await serve_all(client, work[:8]) < LONGEST_REQUEST
        await until(lambda: index_is_whole(system), timeout=HEAL_SECONDS)


async def test_redis_is_down_at_start(
    system: System,
    redis_server: Server,
    work: list[tuple[list[int], list[list[int]]]],
) -> None:
    """Workers and a router with static addresses start and serve without it; it is used when it comes."""
    for name in ("p0", "d0", "p1", "d1"):
        system[name].kill()
    redis_server.kill()
    static = system.add_router(
        "static", "--prefill-workers", system["p0"].endpoint, "--decode-workers", system["d0"].endpoint
    )
    try:
        await asyncio.to_thread(system.start, "p0", "d0", "static")
        async with AsyncClient(static.endpoint) as client:
            await until(lambda: sum(w.alive for w in system.router_status("static").workers) == 2)
            assert await serve_all(client, work[:8]) < LONGEST_REQUEST
    finally:
        redis_server.restart()
        assert await asyncio.to_thread(static.terminate) == 0
        system.remove("static")
    await asyncio.to_thread(system.start)
    await until(lambda: len(system.workers()) == 4 and index_is_whole(system), timeout=HEAL_SECONDS)
