"""Tiers, fetches and a shared store on real processes that are killed while they write, and a Redis that forgets."""

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import redis

from kvstore.redis_keys import RedisKeys
from pagewire import AsyncClient
from pagewire.v1 import admin_pb2, admin_pb2_grpc
from tests.chaos.oracle import Oracle, greedy, prompt, stream
from tests.chaos.system import System
from tests.chaos.zygote import Zygote
from tests.valkey import Server

SECONDS = 45.0
NUM_PROMPTS, NUM_TOKENS = 16, 10
WORKERS = ("p0", "p1", "d0", "d1")
SALTS = ("", "a", "b")


@pytest.fixture(scope="module")
def store() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def tiered(zygote: Zygote, model: Path, own_redis: Server, store: Server, tmp_path: Path) -> Iterator[System]:
    """2P2D with every tier, each too small for the load, and two routers, one of which sends turns anywhere."""
    with System(zygote, model, tmp_path, own_redis.url) as system:
        for role, name in zip(("prefill", "prefill", "decode", "decode"), WORKERS, strict=True):
            system.add_worker(
                role, name, "--kv-cache-memory-bytes", "400000", "--kv-offloading-size", "200KiB",
                "--kv-disk-path", str(tmp_path / name), "--kv-disk-size", "400KiB",
                "--kv-store-url", store.url, "--kv-store-size", "1MiB", "--kv-fetch", "always",
                "--kv-fetch-min-tokens", "1",
            )  # fmt: skip
        system.add_router("r0")
        system.add_router("r1", "--policy", "round_robin")
        system.restore()
        yield system


def faults_of(system: System, server: Server) -> list[str]:
    """What differs between workers' tiers and Redis, or their devices and both routers' views, or is not free again."""
    faults = system._unquiet()
    held = 0
    for worker in system.workers():
        keys = RedisKeys(worker.root)
        with redis.Redis.from_url(server.url) as client:
            for tier in ("host", "disk"):
                indexed = client.scard(keys.blocks(worker.worker_id, worker.incarnation, tier))
                there = system[worker.worker_id].metric("pagewire:kv_tier_blocks", tier=tier)
                if indexed != there:
                    faults.append(f"{worker.worker_id}: {tier} has {there:g} blocks, the index {indexed}")
        held += system.worker_status(worker).num_cached_blocks
    views = {name: system.router_status(name).num_indexed_blocks for name in ("r0", "r1")}
    return faults + [f"{name} sees {seen} of {held} blocks" for name, seen in views.items() if seen != held]


class Faults:
    """One at a time; what is killed is back before the next one comes."""

    def __init__(self, system: System, server: Server, store: Server, rng: random.Random) -> None:
        self._system, self._server, self._store, self._rng = system, server, store, rng
        self.done: list[str] = []

    async def until(self, end: float) -> None:
        while time.monotonic() < end:
            await asyncio.sleep(self._rng.uniform(0.2, 0.8))
            what = self._rng.choice(("kill", "kill", "kill", "freeze", "forget", "store", "tenant", "reset"))
            self.done.append(what)
            if what == "store":
                self._store.kill()  # in this thread: a Valkey dies with the one that started it
                await asyncio.sleep(0.5)
                self._store.restart()
            else:
                await asyncio.to_thread(getattr(self, f"_{what}"))

    def _kill(self) -> None:
        name = self._rng.choice(WORKERS)
        self._system[name].kill()
        time.sleep(self._rng.uniform(0.0, 0.5))
        self._system.start(name)

    def _freeze(self) -> None:
        service = self._system[self._rng.choice(WORKERS)]
        service.freeze()
        time.sleep(self._rng.uniform(0.1, 1.0))
        service.thaw()

    def _forget(self) -> None:
        self._server.command("FLUSHALL")

    def _tenant(self) -> None:
        with grpc.insecure_channel(self._system["r0"].endpoint) as channel, suppress(grpc.RpcError):
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            stub.ClearPrefix(admin_pb2.ClearPrefixRequest(cache_salt=self._rng.choice(SALTS)), timeout=10)

    def _reset(self) -> None:
        with grpc.insecure_channel(self._system["r0"].endpoint) as channel, suppress(grpc.RpcError):
            admin_pb2_grpc.AdminServiceStub(channel).ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(), timeout=10)


@pytest.mark.nightly
@pytest.mark.timeout(300)
async def test_whatever_happens_below_the_device_no_token_is_wrong(
    tiered: System, own_redis: Server, store: Server, oracle: Oracle
) -> None:
    """Workers are killed while they write, fetch and load; a disk is found again by the next process; one tenant, or
    everything, is cleared meanwhile; Redis and the store forget. Afterwards the index is what the workers hold."""
    rng = random.Random(7)
    work = [(ids, oracle(ids, **greedy(NUM_TOKENS))) for ids in (prompt(60, 300 + i) for i in range(NUM_PROMPTS))]
    end, counts = time.monotonic() + SECONDS, dict.fromkeys(("requests", "hits"), 0)

    async def ask(client: AsyncClient, mine: random.Random) -> None:
        while time.monotonic() < end:
            ids, expected = mine.choice(work)
            got = await stream(client, ids, timeout=60.0, cache_salt=mine.choice(SALTS), **greedy(NUM_TOKENS))
            assert got.outputs == expected
            counts["requests"] += 1
            counts["hits"] += got.num_cached_tokens > 0

    faults = Faults(tiered, own_redis, store, rng)
    async with AsyncClient(tiered["r0"].endpoint) as first, AsyncClient(tiered["r1"].endpoint) as second:
        asking = [ask(client, random.Random(i)) for i, client in enumerate((first, second, first, second))]
        await asyncio.gather(faults.until(end), *asking)
    print(counts, faults.done)
    await asyncio.to_thread(tiered.restore)
    deadline = time.monotonic() + 60
    while left := await asyncio.to_thread(faults_of, tiered, own_redis):
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.2)
    assert counts["requests"] > 20
    assert counts["hits"] > 5
