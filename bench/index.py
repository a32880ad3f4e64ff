"""Times the prefix index: lookups from memory and from Redis, events into a router, memory; beside two other layouts.

    .venv/bin/python bench/index.py --quick                     under a minute, prints a table
    .venv/bin/python bench/index.py --out FILE                  the full size, and a CSV
    .venv/bin/python bench/index.py --server redis-server       another server than the embedded Valkey

Prompts have 512 blocks: 128 that a customer's prompts share, the rest a conversation's own. Each worker holds whole
conversations and the beginnings of others. Layouts on the same server, holding the same blocks:

    set per worker   pagewire's: a set of block keys a worker, searched on the server by a script, which begins where
                     the router's view says; with an empty view it bisects
    hash per block   a hash of holders a block; 512 pipelined HKEYS, walked by the client
    Lua walk         the same hashes, walked on the server from the first block until nobody is left

`mixed` looks up such prompts, `cold` ones that nobody has, `ragged` the worst case: every worker has another depth.
An event of n blocks stores n and removes n, as a full worker's do. "of CPU": per second of the router's own; a lookup's
"CPU" is of both processes, on the mean: what a busy machine cannot change.
"""

import argparse
import asyncio
import csv
import gc
import os
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any

import redis.asyncio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.index_world import LUA_WALK, PROMPT_BLOCKS, World, fresh, make_chain
from bench.machine import describe
from kvstore.embedded_valkey import EmbeddedValkey
from kvstore.index_view import START, IndexView
from kvstore.memory_index import MemoryIndex
from kvstore.redis_index import RedisIndex
from kvstore.redis_keys import BlockEvent, RedisKeys
from kvstore.redis_lookup import DirectLookup
from kvstore.registry import WorkerRecord

INCARNATION = 7


@dataclass(frozen=True, slots=True)
class Point:
    workers: int
    blocks: int
    layout: str
    what: str
    p50: float
    p99: float
    unit: str


def _seq(index: RedisIndex, worker_id: str) -> int:
    """How far into the worker's events the router is."""
    position = index.position(worker_id)
    return -1 if position is None else position[2]


def percentiles(seconds: list[float]) -> tuple[float, float]:
    seconds.sort()
    return seconds[len(seconds) // 2], seconds[min(len(seconds) - 1, len(seconds) * 99 // 100)]


class Bench:
    """One number of workers on one server."""

    def __init__(self, world: World, num_lookups: int, seconds: float) -> None:
        self.world = world
        self.num_lookups = num_lookups
        self.seconds = seconds  # for each kind of lookup on the server
        self.root = os.urandom(32)
        self.names = RedisKeys(self.root)

    def point(self, layout: str, what: str, p50: float, p99: float, unit: str) -> Point:
        return Point(len(self.world.worker_ids), self.world.num_blocks, layout, what, p50, p99, unit)

    # --- memory ---

    def in_memory(self) -> Iterator[Point]:
        """Lookups in a router's view, and its size."""
        gc.collect()
        held = {worker_id: fresh(keys) for worker_id, keys in self.world.held.items()}  # as parsed from the network
        before = sum(len(keys) * sys.getsizeof(keys[0]) for keys in held.values())
        tracemalloc.start()
        index = MemoryIndex()
        for worker_id in self.world.worker_ids:
            index.register(WorkerRecord(worker_id, "", "decode", INCARNATION), held[worker_id])
        # The keys themselves were made before; those that are kept belong to the index too.
        size = tracemalloc.get_traced_memory()[0] + before
        tracemalloc.stop()
        yield self.point("memory", "bytes per block held", size / self.world.num_blocks, 0, "B")
        del held
        yield from self.memory_lookups(index)

    def memory_lookups(self, index: MemoryIndex) -> Iterator[Point]:
        """`ragged` again (the depths that the last lookup found), one worker further each time, and never seen."""
        kinds = [(kind, "") for kind in self.world.prompts] + [("ragged", ", one moved"), ("ragged", ", first time")]
        for kind, how in kinds:
            seconds: list[float] = []
            for number, prompt in enumerate(self.lookups(kind)):
                keys = fresh(prompt)
                worker_id = self.world.worker_ids[number % len(self.world.worker_ids)]
                if how == ", one moved":
                    depth = index.lookup(keys)[worker_id]
                    index.store(worker_id, keys[depth : depth + 1])
                elif how == ", first time":
                    index.forget_chains()
                start = time.perf_counter()
                index.lookup(keys)
                seconds.append(time.perf_counter() - start)
            p50, p99 = percentiles(seconds)
            yield self.point("memory", f"lookup {kind}{how}", 1e6 * p50, 1e6 * p99, "us")

    def lookups(self, kind: str) -> Iterator[list[bytes]]:
        prompts = self.world.prompts[kind]
        for number in range(self.num_lookups):
            yield prompts[number % len(prompts)]

    # --- Redis ---

    async def timed(
        self, layout: str, client: Any, lookup: Callable[[Sequence[bytes]], Awaitable[dict[str, int] | None]]
    ) -> list[Point]:
        """Latency of a lookup, and its CPU time on both sides; the first of each kind must agree with what is held."""
        points = []
        for kind in self.world.prompts:
            check = self.world.prompts[kind][0]
            assert await lookup(check) == self.expected(check), f"{layout} is wrong"
            seconds: list[float] = []
            cpu = -time.process_time() - await server_cpu(client)
            for prompt in self.lookups(kind):
                if len(seconds) > 3 and sum(seconds) > self.seconds:
                    break
                start = time.perf_counter()
                found = await lookup(prompt)
                seconds.append(time.perf_counter() - start)
                assert found is not None, "the direct lookup ran out of its budget"
            cpu += time.process_time() + await server_cpu(client)
            p50, p99 = percentiles(seconds)
            points.append(self.point(layout, f"lookup {kind}", 1e6 * p50, 1e6 * p99, "us"))
            points.append(self.point(layout, f"lookup {kind}, CPU", 1e6 * cpu / len(seconds), 0, "us"))
        return points

    def expected(self, prompt: Sequence[bytes]) -> dict[str, int]:
        found = {}
        for worker_id, keys in self.world.held.items():
            held = set(keys)
            found[worker_id] = next((n for n, key in enumerate(prompt) if key not in held), len(prompt))
        return found

    async def set_per_worker(self, url: str, client: Any) -> list[Point]:
        start, used = time.perf_counter(), await used_memory(client)
        for worker_id, keys in self.world.held.items():
            record = WorkerRecord(worker_id, "", "decode", INCARNATION, 1, 1, root=self.root)
            async with client.pipeline(transaction=False) as pipe:
                pipe.sadd(self.names.workers, worker_id)
                pipe.hset(self.names.worker(worker_id), mapping=record.to_hash())
                for i in range(0, len(keys), 1024):
                    pipe.sadd(self.names.blocks(worker_id, INCARNATION), *keys[i : i + 1024])
                await pipe.execute()
        points = self.stored("set per worker", time.perf_counter() - start, await used_memory(client) - used)
        index = RedisIndex(url, self.root, poll_seconds=5.0, socket_timeout=30.0, direct_timeout=10.0)
        await index.start()
        start = time.perf_counter()
        await index.quiesce(300)
        points.append(self.point("set per worker", "router start", time.perf_counter() - start, 0, "s"))
        points += await self.timed("set per worker", client, index.lookup_direct)
        direct, nothing = DirectLookup(10.0), dict[str, int]()

        async def blind(prompt: Sequence[bytes]) -> dict[str, int] | None:
            return await direct.lookup(client, self.names, prompt, self.world.worker_ids, nothing)

        points += await self.timed("set per worker, empty view", client, blind)
        await direct.close()
        points += await self.events(index, client)
        await index.stop()
        return points

    def stored(self, layout: str, seconds: float, num_bytes: float) -> list[Point]:
        num_blocks = self.world.num_blocks
        return [
            self.point(layout, "store (pipelined)", num_blocks / seconds, 0, "blocks/s"),
            self.point(layout, "server bytes per block held", num_bytes / num_blocks, 0, "B"),
        ]

    async def events(self, index: RedisIndex, client: Any) -> list[Point]:
        """How fast one router takes a backlog of the stream, and how fast its rules alone are."""
        points = []
        for blocks_per_event in (1, 4, 16):
            events = list(self.some_events(12_000 // blocks_per_event + 2000, blocks_per_event, index))
            num_blocks = sum(len(event.stored) + len(event.removed) for event in events)
            view = IndexView()
            for worker_id, record in index.workers().items():
                view.expect_read([worker_id])
                view.begin_snapshot(record)
                view.finish_read(worker_id, replace(record, seq=_seq(index, worker_id)), START)
            start = time.perf_counter()
            for number, event in enumerate(events, 1):
                view.apply(b"1-%d" % number, event)
            assert not view.is_reading, "an event was not taken"
            name = f"apply events of {blocks_per_event}"
            points.append(self.point("memory", name, num_blocks / (time.perf_counter() - start), 0, "blocks/s"))
            # One piece on the wire, so that the router finds a backlog and writing it is not what is measured.
            async with client.pipeline(transaction=True) as pipe:
                for event in events:
                    pipe.xadd(self.names.events, event.to_fields())
                for worker_id, seq in self.seqs.items():
                    pipe.hset(self.names.worker(worker_id), "seq", seq)
                await pipe.execute()
            clocks = (time.perf_counter, time.process_time)  # the server is another process
            started, reads = [now() for now in clocks], index.num_reads
            async with asyncio.timeout(60):
                while any(_seq(index, each) < seq for each, seq in self.seqs.items()):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            name = f"events of {blocks_per_event} into a router"
            rates = [num_blocks / (now() - then) for now, then in zip(clocks, started, strict=True)]
            assert index.num_reads == reads, "an event was lost"
            points.append(self.point("set per worker", name, rates[0], 0, "blocks/s"))
            points.append(self.point("set per worker", f"{name}, of CPU", rates[1], 0, "blocks/s"))
        return points

    def some_events(self, num_events: int, size: int, index: RedisIndex) -> Iterator[BlockEvent]:
        """As steps bring them: every worker in turn stores some blocks and, being full, evicts as many."""
        self.seqs = {worker_id: _seq(index, worker_id) for worker_id in index.workers()}
        last: dict[str, list[bytes]] = {}
        for number in range(num_events):
            worker_id = self.world.worker_ids[number % len(self.world.worker_ids)]
            self.seqs[worker_id] += 1
            stored = make_chain(size)
            removed, last[worker_id] = last.get(worker_id, ()), stored
            yield BlockEvent(
                worker_id, INCARNATION, 1, self.seqs[worker_id], stored=tuple(stored), removed=tuple(removed)
            )

    async def hash_per_block(self, client: Any) -> list[Point]:
        prefix = f"{self.names.prefix}block:".encode()
        start, used = time.perf_counter(), await used_memory(client)
        for worker_id, keys in self.world.held.items():
            async with client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.hset(prefix + key, worker_id, "1")
                await pipe.execute()
        points = self.stored("hash per block", time.perf_counter() - start, await used_memory(client) - used)
        worker_ids = self.world.worker_ids

        async def hkeys(prompt: Sequence[bytes]) -> dict[str, int]:
            async with client.pipeline(transaction=False) as pipe:
                for key in prompt:
                    pipe.hkeys(prefix + key)
                holders = await pipe.execute()
            depths = dict.fromkeys(worker_ids, 0)
            alive = {worker_id.encode() for worker_id in worker_ids}
            for depth, found in enumerate(holders):
                kept = alive.intersection(found)
                depths |= {name.decode(): depth for name in alive - kept}
                alive = kept
            return depths | {name.decode(): len(prompt) for name in alive}

        script = client.register_script(LUA_WALK)

        async def lua_walk(prompt: Sequence[bytes]) -> dict[str, int]:
            found = await script(keys=[prefix + key for key in prompt], args=worker_ids)
            return dict(zip(worker_ids, found, strict=True))

        points += await self.timed("hash per block", client, hkeys)
        return points + await self.timed("Lua walk", client, lua_walk)


async def used_memory(client: Any) -> float:
    return float((await client.info("memory"))["used_memory"])


async def server_cpu(client: Any) -> float:
    """Seconds that the server has computed so far."""
    info = await client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


async def measure(
    worker_counts: Sequence[int], total_blocks: int, num_lookups: int, seconds: float, program: str
) -> list[Point]:
    points: list[Point] = []
    for num_workers in worker_counts:
        world = World.make(num_workers, max(total_blocks // num_workers, PROMPT_BLOCKS), Random(num_workers))
        bench = Bench(world, num_lookups, seconds)
        here = list(bench.in_memory())
        server = EmbeddedValkey.start(program=None if program == "valkey" else [program])
        try:
            async with redis.asyncio.Redis.from_url(server.url, protocol=2) as client:
                here += await bench.set_per_worker(server.url, client)
                here += await bench.hash_per_block(client)
        finally:
            server.stop()
        for each in here:
            tail = f"{each.p99:>12.1f}" if each.p99 else f"{'':>12}"
            row = f"{each.workers:>7}{each.blocks:>9}  {each.layout:<27}{each.what:<36}{each.p50:>12.1f}{tail}"
            print(f"{row} {each.unit}", flush=True)
        points += here
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--out", type=Path, help="write a CSV")
    parser.add_argument("--server", default="valkey", help="valkey (embedded) or a program such as redis-server")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64, 512])
    options = parser.parse_args()
    machine = describe()
    print(", ".join(f"{name} {value}" for name, value in machine.items()) + f", server {options.server}")
    print(f"{'workers':>7}{'blocks':>9}  {'layout':<27}{'what':<36}{'p50 or rate':>12}{'p99':>12}")
    size = (20_000, 300, 0.4) if options.quick else (1_000_000, 4000, 5.0)
    points = asyncio.run(measure(options.workers, *size, options.server))
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*machine, "server", *(field.name for field in fields(Point))])
            for each in points:
                writer.writerow([*machine.values(), options.server, *astuple(each)])


if __name__ == "__main__":
    main()
