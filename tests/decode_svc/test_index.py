"""What workers publish is what they hold: after transfers, evictions and resets, on an idle worker too."""

import grpc
import pytest

from pagewire.v1 import admin_pb2, admin_pb2_grpc
from tests.decode_svc.harness import cluster, greedy, random_prompt, until
from tests.valkey import Server


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        yield server


async def held(app):
    """16-byte keys that the worker says it holds."""
    async with grpc.aio.insecure_channel(app.description.endpoint) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        return set((await stub.ListCachedBlocks(admin_pb2.ListCachedBlocksRequest())).keys)


async def published(server, app):
    """The same as Redis has it, once everything is written."""
    await app.worker.quiesce()
    return now_in_redis(server, app)


def now_in_redis(server, app):
    me = app.description
    name = f"pw:{{{me.fingerprint.root[:16].hex()}}}:blocks:{me.worker_id}:{me.incarnation}"
    return set(server.command("SMEMBERS", name))


async def test_index_is_what_workers_hold(tiny_model, server):
    small = {"num_blocks": 16}
    async with cluster(
        tiny_model("llama"), redis_url=server.url, prefill_options=small, decode_options=small
    ) as workers:
        for seed in range(6):
            prompt = random_prompt(9 + 4 * (seed % 3), seed % 4)
            await workers.run(prompt, greedy(6))
        for app in (workers.prefill, workers.decode):
            assert len(await held(app)) > 4
            assert await published(server, app) == await held(app)
        async with grpc.aio.insecure_channel(workers.decode.description.endpoint) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            reset = await stub.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
            assert reset.num_blocks == len(workers.decode_engine.kv_cache.cached_keys()) + reset.num_blocks
        assert await held(workers.decode) == set()
        assert await published(server, workers.decode) == set()
        root = workers.decode.description.fingerprint.root
        name = f"pw:{{{root[:16].hex()}}}:workers"
        assert len(server.command("SMEMBERS", name)) == 2
    assert server.command("SMEMBERS", name) in ([], set())


async def test_c4_an_idle_workers_reset_reaches_the_index(tiny_model, server):
    """CASES C4: nobody asks, and no step follows whose events would take this one along."""
    async with cluster(tiny_model("llama"), redis_url=server.url) as workers:
        await workers.run(random_prompt(9, 1), greedy(6))
        for app in (workers.prefill, workers.decode):
            assert await published(server, app)
            async with grpc.aio.insecure_channel(app.description.endpoint) as channel:
                stub = admin_pb2_grpc.AdminServiceStub(channel)
                await stub.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
            await until(lambda app=app: not now_in_redis(server, app))


async def test_workers_start_and_serve_without_a_reachable_redis(tiny_model, server):
    with Server() as other:
        url = other.url
    async with cluster(tiny_model("llama"), redis_url=url) as workers:
        assert len(await workers.run(random_prompt(9, 1), greedy(6))) == 1
