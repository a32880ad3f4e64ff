"""The Redis index when things break: no server, a server that dies, forgets or hangs; zombies; overflow; bad URLs."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from random import Random

import pytest
import pytest_asyncio
import redis.asyncio

from kvstore.background import end_tasks
from kvstore.events import CacheEvent
from kvstore.index_view import START, IndexView
from kvstore.redis_connection import RedisTarget, RedisUrlError
from kvstore.redis_index import RedisIndex
from kvstore.redis_keys import BlockEvent, RedisKeys
from kvstore.registry import ModelRecord, WorkerRecord
from tests.kvstore.simulated import RedisBackend, chain, check_equal, crash, until
from tests.valkey import Server

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def server() -> Iterator[Server]:
    """A Valkey of the test's own, to be killed, flushed and paused."""
    with Server() as server:
        yield server


@pytest_asyncio.fixture
async def backend(server: Server) -> AsyncIterator[RedisBackend]:
    backend = RedisBackend(server.url)
    await backend.index.start()
    yield backend
    await backend.close()


# --- the server goes away ---


async def test_a_server_that_dies_loses_hits_and_nothing_else(server: Server, backend: RedisBackend) -> None:
    """Everything Redis had is gone; publisher and view carry on, and meet again."""
    worker, prompt = await backend.worker("w"), chain(20)
    worker.store(prompt[:10])
    assert await backend.depths(prompt) == {"w": 10}
    server.kill()
    await until(lambda: backend.index.state == "disconnected" and worker.publisher.state == "disconnected")
    started = time.perf_counter()
    worker.store(prompt[10:])
    assert backend.index.lookup(prompt) == {"w": 10}  # as last known
    assert await backend.index.lookup_direct(prompt) is None
    assert time.perf_counter() - started < 5  # far below any time-out of Redis
    server.restart()
    assert await backend.depths(prompt) == {"w": 20}
    assert worker.publisher.record.generation == 2
    check_equal(backend)


async def test_both_sides_start_without_a_server(server: Server, backend: RedisBackend) -> None:
    server.kill()
    started = time.perf_counter()
    prompt = chain(5)
    worker = await backend.worker("w", prompt[:2])
    worker.store(prompt[2:])
    assert backend.index.lookup(prompt) == {}
    assert time.perf_counter() - started < 5
    with pytest.raises(TimeoutError):
        await worker.publisher.quiesce(0.1)
    with pytest.raises(TimeoutError):
        await backend.index.quiesce(0.1)
    server.restart()
    assert await backend.depths(prompt) == {"w": 5}
    check_equal(backend)


async def test_flushall_heals(server: Server, backend: RedisBackend) -> None:
    workers = [await backend.worker(f"w{n}", chain(3)) for n in range(3)]
    prompt = chain(4)
    workers[0].store(prompt)
    await backend.settle()
    server.command("FLUSHALL")
    workers[0].store(chain(1))  # one finds out by writing, the others by their heartbeat
    await until(lambda: all(worker.publisher.record.generation == 2 for worker in workers))
    await backend.settle()
    check_equal(backend)
    assert await backend.depths(prompt) == {"w0": 4, "w1": 0, "w2": 0}
    assert server.command("HEXISTS", "pw:models", "tiny") == 1


async def test_a_server_that_hangs_holds_up_nobody(server: Server, backend: RedisBackend) -> None:
    """C12: CLIENT PAUSE. Lookups, publishing and the direct lookup stay within their budgets."""
    worker, prompt = await backend.worker("w"), chain(30)
    worker.store(prompt[:10])
    await backend.settle()
    server.command("CLIENT", "PAUSE", 6000, "ALL")
    started = time.perf_counter()
    assert await backend.index.lookup_direct(prompt) is None
    assert time.perf_counter() - started < 3  # its budget is 100 ms; Redis says nothing for 6 s
    started = time.perf_counter()
    for number in range(10, 30):
        worker.store(prompt[number : number + 1])
        assert backend.index.lookup(prompt) == {"w": 10}
        assert await backend.index.lookup_direct(prompt) is None  # not asked again so soon
    assert time.perf_counter() - started < 3
    assert await backend.depths(prompt) == {"w": 30}
    check_equal(backend)


async def test_the_script_survives_script_flush(server: Server, backend: RedisBackend) -> None:
    prompt = chain(3)
    await backend.worker("w", prompt)
    assert await backend.depths(prompt) == {"w": 3}
    server.command("SCRIPT", "FLUSH")
    assert await backend.depths(prompt) == {"w": 3}


# --- something was lost ---


@pytest.mark.parametrize("idle", [False, True])
async def test_a_lost_event_has_that_worker_read_again(
    backend: RedisBackend, monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    """C5: later blocks of the chain are not dropped; an idle worker's last event is missed too (found by the poll)."""
    worker, other, prompt = await backend.worker("w"), await backend.worker("other"), chain(30)
    worker.store(prompt[:5])
    await backend.settle()
    num_reads = backend.index.num_reads
    apply = IndexView.apply

    def lossy(view: IndexView, event_id: bytes, event: BlockEvent) -> list[str]:
        return [] if event.stored == (prompt[5][:16],) else apply(view, event_id, event)

    monkeypatch.setattr(IndexView, "apply", lossy)
    worker.store(prompt[5:6])
    await worker.publisher.quiesce()
    await until(lambda: (backend.index.position("w") or (0, 0, 0))[2] >= worker.publisher.record.seq - 1)
    if not idle:
        worker.store(prompt[6:])
    other.store(prompt[:2])
    await until(lambda: backend.index.lookup(prompt) == {"w": len(worker.held), "other": 2})
    await backend.settle()
    check_equal(backend)
    assert backend.index.num_reads == num_reads + 1


async def test_a_stream_that_starts_over_with_lower_ids(server: Server, backend: RedisBackend) -> None:
    """A failover to a server whose clock is behind: new events look old."""
    worker, prompt = await backend.worker("w"), chain(4)
    worker.store(prompt[:1])
    await backend.settle()
    events = RedisKeys(backend.root).events
    server.command("XADD", events, "99999999999999-0", "not", "an event")
    await until(lambda: backend.index._follower is not None and backend.index._follower._cursor == b"99999999999999-0")
    server.command("DEL", events)
    worker.store(prompt[1:3])
    assert await backend.depths(prompt) == {"w": 3}
    await until(lambda: backend.index._follower is not None and backend.index._follower._cursor != b"99999999999999-0")
    await asyncio.sleep(1.1)  # until the XREAD from the old cursor ends
    await backend.settle()
    num_reads = backend.index.num_reads
    worker.store(prompt[3:])
    assert await backend.depths(prompt) == {"w": 4}
    assert backend.index.num_reads == num_reads  # events arrive as events again
    check_equal(backend)


async def test_events_that_came_before_the_stream_started_over_are_not_applied_after(
    server: Server, backend: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one piece of the stream is applied the next is here already; of a stream that is no more, both are void."""
    worker, prompt = await backend.worker("w"), chain(2000)
    worker.store(prompt[:1])
    await backend.settle()
    events, follower = RedisKeys(backend.root).events, backend.index._follower
    assert follower is not None
    apply, num_applied = IndexView.apply, 0

    def restarting(view: IndexView, event_id: bytes, event: BlockEvent) -> list[str]:
        nonlocal num_applied
        num_applied += event.worker_id == "stranger"
        if num_applied == 1 and event.worker_id == "stranger":
            server.command("DEL", events)
            worker.store(prompt[1:3])  # the new stream's first
            follower._received = follower._cursor = START  # as the poll does
            view.restart()
            follower._ask_for(view.expect_read(view.memory.workers()))
        return apply(view, event_id, event)

    monkeypatch.setattr(IndexView, "apply", restarting)
    with redis.Redis(port=server.port, protocol=2) as client, client.pipeline(transaction=True) as pipe:
        for seq in range(1, 201):  # four pieces
            pipe.xadd(events, BlockEvent("stranger", 1, 1, seq, "deregistered").to_fields())
        pipe.execute()
    await until(lambda: num_applied > 0)
    assert await backend.depths(prompt) == {"w": 3}
    worker.store(prompt[3:5])
    assert await backend.depths(prompt) == {"w": 5}
    assert num_applied == 1
    check_equal(backend)


async def test_a_buffer_that_overflows_becomes_a_snapshot(server: Server) -> None:
    backend = RedisBackend(server.url, max_buffered_keys=50)
    await backend.index.start()
    worker, prompts = await backend.worker("w"), [chain(20) for _ in range(20)]
    await backend.settle()
    server.kill()
    await until(lambda: worker.publisher.state == "disconnected")
    for prompt in prompts:
        worker.store(prompt)
        worker.evict(prompt[10:])
    server.restart()
    await backend.settle()
    check_equal(backend)
    await backend.close()


async def test_a_lease_that_ends_takes_the_worker_out_and_a_live_one_comes_back(server: Server) -> None:
    backend = RedisBackend(server.url, lease_seconds=0.6)
    await backend.index.start()
    dead, alive = await backend.worker("dead", chain(3)), await backend.worker("alive", chain(3))
    await backend.settle()
    await crash(dead.publisher)
    backend.workers.remove(dead)
    await until(lambda: set(backend.index.workers()) == {"alive"}, 5)
    await asyncio.sleep(1.5)  # several leases long
    await backend.settle()
    check_equal(backend)
    names = RedisKeys(backend.root)
    assert server.command("EXISTS", names.blocks("dead", dead.record.incarnation)) == 0
    assert server.command("SMEMBERS", names.workers) == {b"alive"}
    server.command("DEL", names.worker("alive"), names.workers)  # as if it had been stopped for longer than its lease
    await until(lambda: alive.publisher.record.generation == 2)
    await backend.settle()
    check_equal(backend)
    await backend.close()


async def test_a_zombie_stays_out(backend: RedisBackend) -> None:
    """Two processes under one worker id: the later one has it, and the earlier one changes nothing."""
    zombie, prompt = await backend.worker("w"), chain(6)
    zombie.store(prompt)
    await backend.settle()
    successor = await backend.worker("w", prompt[:2])
    await successor.publisher.quiesce()
    zombie.store(chain(3))
    await until(lambda: zombie.publisher.state == "superseded")
    backend.workers.remove(zombie)
    assert await backend.depths(prompt) == {"w": 2}
    check_equal(backend)
    await zombie.publisher.stop()
    successor.store(prompt[2:3])
    assert await backend.depths(prompt) == {"w": 3}


# --- consistency ---


async def test_set_seq_and_stream_change_together(server: Server, backend: RedisBackend) -> None:
    """C11: whoever looks at any moment sees a set that is exactly the events up to the seq beside it."""
    rng, worker, prompt = Random(0), await backend.worker("w"), chain(40)
    await backend.settle()
    names = RedisKeys(backend.root)
    seen: dict[int, set[bytes]] = {}

    async def look() -> None:
        async with redis.asyncio.Redis.from_url(server.url, protocol=2) as client:
            while True:
                async with client.pipeline(transaction=True) as pipe:
                    pipe.hget(names.worker("w"), "seq")
                    pipe.smembers(names.blocks("w", worker.record.incarnation))
                    seq, blocks = await pipe.execute()
                seen[int(seq)] = set(blocks)

    lookers = [asyncio.create_task(look()) for _ in range(3)]
    for _ in range(400):
        depth = worker.depth(prompt)
        if rng.random() < 0.6 and depth < len(prompt):
            worker.store(prompt[depth : depth + rng.randint(1, 3)])
        elif depth:
            worker.evict(prompt[depth - 1 : depth])
        await asyncio.sleep(rng.choice([0, 0.002]))
    await backend.settle()
    await end_tasks(*lookers)
    held: set[bytes] = set()
    async with redis.asyncio.Redis.from_url(server.url, protocol=2) as client:
        for _, fields in await client.xrange(names.events):
            event = BlockEvent.from_fields(fields)
            held = (set() if event.cleared else held) - set(event.removed) | set(event.stored)
            assert seen.get(event.seq, held) == held
    assert len(seen) > 20
    check_equal(backend)


async def test_views_that_join_at_any_time_agree(backend: RedisBackend) -> None:
    """A set of several pieces changes while it is read; what the events say on top makes it exact."""
    rng, prompt = Random(2), chain(4000)
    worker = await backend.worker("w", prompt)
    views = []
    for number in range(120):
        depth = worker.depth(prompt)
        if rng.random() < 0.5 and depth:
            worker.evict(prompt[max(depth - 200, 0) : depth])
        elif depth < len(prompt):
            worker.store(prompt[depth : depth + 150])
        if number == 80:
            worker.clear()
        if number % 10 == 5:
            views.append(backend.new_view())
            await views[-1].start()
        await asyncio.sleep(0.003)
    await backend.settle()
    for view in views:
        await view.quiesce()
        assert view.blocks("w") == worker.index_keys
        assert view.num_reads == 1
        await view.stop()


async def test_a_backlog_is_read_in_large_pieces(server: Server) -> None:
    """Small events cost more to ask for than to apply."""
    root = os.urandom(32)
    names, record = RedisKeys(root), WorkerRecord("w", "", "decode", 7, 1, 1, root=root)
    keys = [key[:16] for key in chain(4096)]
    events = [BlockEvent("w", 7, 1, seq, stored=(key,)) for seq, key in enumerate(keys, 2)]
    index = RedisIndex(server.url, root, poll_seconds=60.0)
    async with redis.asyncio.Redis.from_url(server.url, protocol=2) as client:
        await client.sadd(names.workers, "w")
        await client.hset(names.worker("w"), mapping=record.to_hash())
        await index.start()
        await until(lambda: index.position("w") == record.position)
        await client.config_resetstat()
        async with client.pipeline(transaction=True) as pipe:
            for event in events:
                pipe.xadd(names.events, event.to_fields())
            await pipe.execute()
        await until(lambda: index.position("w") == events[-1].position)
        num_reads = (await client.info("commandstats"))["cmdstat_xread"]["calls"]
    assert index.blocks("w") == set(keys)
    await index.stop()
    assert num_reads <= 16  # of 64, 64, 128, 256, 512 …; of 64, 64 and 128 by turns they were 45


async def test_any_thread_may_publish(backend: RedisBackend) -> None:
    worker, prompts = await backend.worker("w"), [chain(50) for _ in range(4)]

    def publish(prompt: list[bytes]) -> None:
        for key in prompt:
            worker.publisher.publish([CacheEvent("stored", (key,))])

    threads = [threading.Thread(target=publish, args=(prompt,)) for prompt in prompts]
    for prompt in prompts:
        worker.held |= dict.fromkeys(prompt)
    for thread in threads:
        thread.start()
    await until(lambda: not any(thread.is_alive() for thread in threads))
    await backend.settle()
    check_equal(backend)


async def test_publishers_can_be_stopped_at_any_moment(backend: RedisBackend) -> None:
    """redis-py may lose a cancellation; `stop` returns all the same, and quickly."""
    rng, worker = Random(1), await backend.worker("w")
    for _ in range(60):
        worker.store(chain(2))
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await worker.restart(clean=rng.random() < 0.5)
    await backend.settle()
    check_equal(backend)


# --- finding the model, the server ---


async def test_a_view_by_model_name_follows_the_root(server: Server) -> None:
    """It waits for the model to be announced, and moves when the name stands for other weights."""
    old, new = RedisBackend(server.url), RedisBackend(server.url)
    changes: list[set[str]] = []
    view = RedisIndex(server.url, model="tiny", poll_seconds=0.1)
    view.on_change = lambda: changes.append(set(view.workers()))
    await view.start()
    await asyncio.sleep(0.3)
    assert view.root is None
    assert view.state == "disconnected"
    prompt = chain(4)
    await (await old.worker("old", prompt)).publisher.quiesce()
    await until(lambda: view.lookup(prompt) == {"old": 4})
    assert view.root == old.root
    assert view.model_record == ModelRecord("tiny", old.root)
    await (await new.worker("new", prompt[:2])).publisher.quiesce()
    await until(lambda: view.lookup(prompt) == {"new": 2})
    assert view.root == new.root
    assert {"old"} in changes
    await until(lambda: changes[-1] == {"new"})
    await view.stop()
    assert view.state == "off"
    await old.close()
    await new.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "http://localhost:6379",
            "scheme 'http' is unknown; it must be redis://",
        ),
        ("localhost:6379", "scheme 'localhost' is unknown"),
        ("", "scheme '' is unknown"),
        ("redis://", "the host is missing"),
        ("redis://host:port", "'host:port' has a bad port"),
        ("redis://host:99999", "'host:99999' has a bad port"),
        ("redis://host/one", "the database must be one number, not 'one'"),
        ("redis://a,b", "several hosts need redis+sentinel:// or redis+cluster://"),
        ("redis+sentinel://host:26379", "the service's name is missing: redis+sentinel://host:port/service"),
        ("redis+cluster://host/1", "a cluster has no databases"),
        ("unix://", "the path of the socket is missing"),
        ("redis://me:secret@host:x", "'host:x' has a bad port"),
    ],
)
def test_a_bad_url_is_named(url: str, message: str) -> None:
    with pytest.raises(RedisUrlError) as caught:
        RedisTarget.parse(url)
    assert f"bad Redis URL {url.replace('me:secret', '***')!r}: {message}" in str(caught.value)
    with pytest.raises(RedisUrlError):
        RedisIndex(url, b"r" * 32)


def test_a_password_that_is_not_encoded_is_not_shown() -> None:
    with pytest.raises(RedisUrlError, match=r"bad Redis URL 'redis://\*\*\*@h:1/0': '/', .* must be written") as caught:
        RedisTarget.parse("redis://me:sec/ret@h:1/0")
    assert "sec" not in str(caught.value)
    assert RedisTarget.parse("unix:///a@b").path == "/a@b"


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ("redis://h", "redis://H:6379/0", True),
        ("redis://u:p@h:1/2", "valkeys://h:1/2", True),
        ("redis://[::1]", "redis://localhost:6379", True),
        ("redis://[fe80::1]:6379", "redis://[fe80::1]", True),
        ("redis://h:1", "redis://h:1/1", False),
        ("redis://h:1", "redis://h:2", False),
        ("unix:///a/b", "unix:///a//b?db=0", True),
        ("unix:///a", "unix://:pw@/a", True),
        ("unix:///a", "unix:///a?db=1", False),
        ("redis+sentinel://a,b/main", "redis+sentinel://b:26379/main/0", True),
        ("redis+sentinel://a/main", "redis+sentinel://a/other", False),
        ("redis+cluster://a:1,b:2", "redis://b:2", True),
    ],
)
def test_what_leads_to_one_database_is_known(one: str, other: str, shared: bool) -> None:
    assert RedisTarget.parse(one).shares_database(RedisTarget.parse(other)) is shared
    assert RedisTarget.parse(other).shares_database(RedisTarget.parse(one)) is shared


def test_urls_of_every_kind_of_redis() -> None:
    def parse(url: str) -> tuple[object, ...]:
        target = RedisTarget.parse(url)
        return target.kind, target.nodes, target.tls, target.db, target.username, target.password

    assert parse("redis://host") == ("server", (("host", 6379),), False, 0, None, None)
    assert parse("valkeys://me:p%40ss@[::1]:7/3") == ("server", (("::1", 7),), True, 3, "me", "p@ss")
    assert parse("redis://:secret@host") == ("server", (("host", 6379),), False, 0, None, "secret")
    nodes = (("a", 26379), ("b", 7))
    assert parse("redis+sentinel://a,b:7/main/2") == ("sentinel", nodes, False, 2, None, None)
    assert RedisTarget.parse("redis+sentinel://a,b:7/main/2").service == "main"
    assert parse("redis+cluster://a:1,b:2") == ("cluster", (("a", 1), ("b", 2)), False, 0, None, None)
    assert RedisTarget.parse("unix:///run/valkey.sock?db=2").path == "/run/valkey.sock"
    assert "secret" not in repr(RedisTarget.parse("redis://:secret@host"))
