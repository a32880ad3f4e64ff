"""Heartbeats while a request waits, draining, and what routers and operators see of real workers."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.config import WorkerConfig
from pagewire.v1 import admin_pb2, admin_pb2_grpc, decode_pb2, prefill_pb2, worker_pb2, worker_pb2_grpc
from prefill_svc.app import PrefillApp
from tests.decode_svc.harness import BLOCK_SIZE, Gate, cluster, greedy, make_engine, random_prompt, reference, until

PROMPT, PARAMS = random_prompt(5 * BLOCK_SIZE + 1, 1), greedy(5)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def expected(model):
    return reference(model, [(PROMPT, PARAMS)])[0][0]


async def wait_without_room(workers, expected):
    kv_cache = workers.decode_engine.kv_cache
    held = kv_cache.allocate(kv_cache.num_free)
    request = workers.request(PROMPT, PARAMS)
    await workers.prefill_all(request)
    decoding = asyncio.create_task(workers.decode_all(request, workers.ticket))
    await asyncio.sleep(5.0)
    (ticket,) = workers.prefill.worker.leases.tickets
    assert ticket.epoch == 1
    kv_cache.release(held)
    assert await decoding == [expected[1:]]
    assert workers.value(workers.decode, "pagewire:prefill_tokens_on_decode_total") == 0


async def test_heartbeats_keep_the_lease_while_decode_has_no_room(model, expected):
    async with cluster(model, lease_seconds=2.0) as workers:
        await wait_without_room(workers, expected)


async def test_an_idle_connection_sends_its_first_heartbeat_in_time(model, expected):
    """The lease is shorter than the pause between heartbeats of a peer that holds nothing."""
    async with cluster(model, lease_seconds=2.0) as workers:
        await workers.run(random_prompt(9, 2), PARAMS)
        await asyncio.sleep(0.3)
        await wait_without_room(workers, expected)


async def test_a_draining_prefill_worker_lets_peers_finish(model, expected):
    async with cluster(model) as workers, grpc.aio.insecure_channel(workers.prefill.description.endpoint) as channel:
        request = workers.request(PROMPT, PARAMS)
        await workers.prefill_all(request)
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        await admin.Drain(admin_pb2.DrainRequest())
        check = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert check.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="draining") as error:
            await workers.prefill_all(workers.request(PROMPT, PARAMS))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert workers.prefill.worker.has_work
        ticket = bytes(workers.prefill.worker.leases.tickets[0].name)
        assert await workers.decode_all(request, ticket) == [expected[1:]]
        await until(lambda: not workers.prefill.worker.has_work)


async def test_a_draining_decode_worker_finishes_what_it_has(model, expected):
    async with cluster(model) as workers, grpc.aio.insecure_channel(workers.decode.description.endpoint) as channel:
        gate = Gate(workers.decode_engine)
        running = asyncio.create_task(workers.decode_all(workers.request(PROMPT, PARAMS), None))
        await until(lambda: workers.decode.worker.status().num_requests)
        drain = await admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest())
        assert drain.num_requests == 1
        with pytest.raises(grpc.aio.AioRpcError, match="draining"):
            await workers.decode_all(workers.request(PROMPT, PARAMS), None)
        gate.open()
        assert await running == [expected]


async def test_what_routers_and_operators_see(model):
    async with cluster(model) as workers, grpc.aio.insecure_channel(workers.prefill.description.endpoint) as channel:
        watch = worker_pb2_grpc.WorkerServiceStub(channel).WatchWorker(worker_pb2.WatchWorkerRequest())
        first = await watch.read()
        me = first.info
        assert (me.endpoint, me.role, me.num_blocks) == (workers.prefill.description.endpoint, 1, 64)
        assert (me.fingerprint.block_size, len(me.fingerprint.root)) == (BLOCK_SIZE, 32)
        assert me.fingerprint.layout_id
        assert me.fingerprint.numerics_class
        assert first.load.num_free_blocks == 64
        await workers.prefill_all(workers.request(PROMPT, PARAMS))
        while (load := (await watch.read()).load).num_held_blocks != 6:
            pass
        assert load.num_free_blocks == 58
        status = await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest())
        (worker,) = status.workers
        assert (worker.num_cached_blocks, worker.num_referenced_blocks, worker.num_requests) == (5, 6, 0)
        (ticket,) = worker.tickets
        assert (ticket.state, ticket.epoch, ticket.num_blocks) == ("leased", 0, 6)
        assert 0 < ticket.lease_ms <= 30_000
        assert workers.ticket.hex().startswith(ticket.ticket_prefix)
        assert len(ticket.ticket_prefix) == 8
        await workers.prefill_stub.ReleaseTicket(prefill_pb2.ReleaseTicketRequest(ticket=workers.ticket))
        while (load := (await watch.read()).load).num_held_blocks:
            pass
        assert load.num_free_blocks == 64
        watch.cancel()
        assert workers.value(workers.prefill, "pagewire:step_seconds_count") > 0
        assert workers.value(workers.prefill, "vllm:prompt_tokens_total") == len(PROMPT)


async def test_stop_with_work_in_flight_leaves_nothing(model):
    """Nothing is waited for: the streams fail, both engines stop, every block comes back."""
    async with cluster(model, prefill_options={"max_num_batched_tokens": 8}) as workers:
        gate = Gate(workers.prefill_engine)
        request = workers.request(PROMPT, PARAMS)
        call = workers.prefill_stub.Prefill(prefill_pb2.PrefillRequest(request=request, hand_off=True))
        ticket = (await call.read()).accepted.ticket
        message = decode_pb2.DecodeRequest(request=request, source=workers.source(ticket))
        decoding = workers.decode_stub.Decode(message)
        await decoding.read()
        gate.let()
        await until(lambda: workers.decode_engine.kv_cache.num_referenced == 2)
        gate.open()
        await workers.decode.stop()
        await workers.prefill.stop()
        for engine in (workers.prefill_engine, workers.decode_engine):
            assert engine.kv_cache.num_referenced == 0


async def test_prefill_comes_back_on_the_same_port(model, expected):
    """Case B1, B2: the new incarnation is a new peer, and nothing of the old one stays."""
    async with cluster(model) as workers:
        assert await workers.run(PROMPT, PARAMS) == [expected]
        (old_peer,) = workers.decode.worker.peers.connected()
        old = workers.prefill
        port = int(old.description.endpoint.rpartition(":")[2])
        await old.stop()
        engine = make_engine(model)
        new = PrefillApp(WorkerConfig(role="prefill", engine=engine.options, port=port), engine)
        await new.start()
        await new.server.server.start()
        workers.prefill = new
        try:
            assert new.description.incarnation != old.description.incarnation
            assert await workers.run(random_prompt(11, 7), PARAMS) != []
            assert workers.value(workers.decode, "pagewire:prefill_tokens_on_decode_total") == 0
            (new_peer,) = workers.decode.worker.peers.connected()
            assert new_peer is not old_peer
            assert old_peer.is_retired
            assert engine.kv_cache.num_referenced == 0
        finally:
            workers.prefill = old
            await new.stop()
            engine.close()


async def test_logprobs_come_from_both_sides(model):
    async with cluster(model) as workers:
        request = workers.request(PROMPT, greedy(4, logprobs=2))
        first = await workers.prefill_all(request)
        call = workers.decode_stub.Decode(
            decode_pb2.DecodeRequest(request=request, source=workers.source(workers.ticket))
        )
        tokens = [*first.tokens, *[response.token async for response in call if response.HasField("token")]]
        assert [token.index for token in tokens] == [0, 1, 2, 3]
        for token in tokens:
            assert (token.logprobs.rank, len(token.logprobs.top)) == (1, 2)
            assert token.logprobs.top[0].token_id == token.token_id
            assert token.logprobs.top[0].logprob == token.logprobs.logprob < 0
