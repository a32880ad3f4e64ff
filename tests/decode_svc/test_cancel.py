"""A request can be cancelled in every state, and then neither side holds anything of it."""

import asyncio
import socket

import grpc
import pytest

import transfer_svc.prefix
from pagewire.v1 import decode_pb2, prefill_pb2
from tests.decode_svc.harness import BLOCK_SIZE, Gate, cluster, greedy, random_prompt, reference, until

PROMPT = random_prompt(6 * BLOCK_SIZE, 1)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


async def cancelled(call):
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.read()


async def all_free(workers):
    await until(lambda: not workers.decode.worker.has_work)
    await until(lambda: workers.decode_engine.kv_cache.num_referenced == 0)


async def start_prefill(workers, request):
    call = workers.prefill_stub.Prefill(prefill_pb2.PrefillRequest(request=request, hand_off=True))
    return call, (await call.read()).accepted.ticket


def decode(workers, request, ticket=None):
    source = None if ticket is None else workers.source(ticket)
    return workers.decode_stub.Decode(decode_pb2.DecodeRequest(request=request, source=source))


async def test_while_prefill_computes(model):
    async with cluster(model, prefill_options={"max_num_batched_tokens": 8}) as workers:
        gate = Gate(workers.prefill_engine)
        request = workers.request(PROMPT, greedy(5))
        prefill, ticket = await start_prefill(workers, request)
        call = decode(workers, request, ticket)
        assert (await call.read()).HasField("accepted")
        gate.let()
        await until(lambda: workers.decode_engine.kv_cache.num_referenced == 2)
        await cancelled(call)
        await all_free(workers)
        prefill.cancel()
        gate.open()


async def test_what_is_given_up_or_refused_is_counted(model):
    async with cluster(model, max_queued_requests=1) as workers:
        prefill_gate, decode_gate = Gate(workers.prefill_engine), Gate(workers.decode_engine)
        first = decode(workers, workers.request(PROMPT, greedy(5), tenant="A"))
        await until(lambda: len(workers.decode.worker._queue) == 1)
        (queue,) = workers.decode.worker.status().queues
        assert (queue.tenant, queue.num_requests, queue.num_tokens) == ("A", 1, len(PROMPT))
        with pytest.raises(grpc.aio.AioRpcError, match="max_queued_requests is 1; 1 are this tenant's"):
            await decode(workers, workers.request(PROMPT, greedy(5), tenant="A")).read()
        other = decode(workers, workers.request(PROMPT, greedy(5), tenant="B"))
        await until(lambda: len(workers.decode.worker._queue) == 2)
        prefill, _ = await start_prefill(workers, workers.request(PROMPT, greedy(5)))
        (ticket,) = workers.prefill.worker.status().tickets
        assert (ticket.request_id[0], ticket.holder, ticket.holder_left) == ("r", "", False)
        for call in (first, other, prefill):
            call.cancel()
        for app, num in ((workers.decode, 2), (workers.prefill, 1)):
            await until(lambda app=app, num=num: workers.value(app, "pagewire:requests_cancelled_total") == num)
        rejected = workers.value(workers.decode, "pagewire:requests_rejected_total", reason="max_queued_requests")
        assert rejected == 1
        prefill_gate.open()
        decode_gate.open()
        await all_free(workers)


async def test_who_has_a_slot_is_in_no_queue_though_its_turn_has_not_come(model):
    async with cluster(model, decode_options={"max_num_batched_tokens": 8}) as workers:
        worker, gate = workers.decode.worker, Gate(workers.decode_engine)
        calls = [decode(workers, workers.request(random_prompt(41, seed), greedy(5))) for seed in range(2)]
        await until(lambda: len(worker._queue) == 2)
        for num_queued_tokens in (41 - 8 + 41, 41 - 16 + 41):  # the second may have come behind the first step's plan
            gate.let()
            await until(lambda num=num_queued_tokens: worker.load().num_queued_tokens == num)
        load = worker.load()
        assert (load.num_running, load.num_waiting, len(worker._queue)) == (2, 0, 0)
        gate.open()
        for call in calls:
            await cancelled(call)
        await all_free(workers)


async def test_while_blocks_are_copied(model, monkeypatch):
    """Case A4: the blocks are not given back under a copy that still runs."""
    started, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    copy = transfer_svc.prefix.copy_blocks

    def slow(*arguments):
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(10)
        copy(*arguments)

    monkeypatch.setattr(transfer_svc.prefix, "copy_blocks", slow)
    async with cluster(model, plane="grpc") as workers:
        request = workers.request(PROMPT, greedy(5))
        await workers.prefill_all(request)
        call = decode(workers, request, workers.ticket)
        await call.read()
        await started.wait()
        await cancelled(call)
        await asyncio.sleep(0.05)
        assert workers.decode_engine.kv_cache.num_referenced == 6, "still being written"
        go_on.set()
        await all_free(workers)


async def test_while_the_peer_does_not_answer(model):
    async with cluster(model) as workers:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            request = workers.request(PROMPT, greedy(5))
            source = decode_pb2.TransferSource(
                endpoint=f"127.0.0.1:{silent.getsockname()[1]}", incarnation=1, ticket=b"t" * 16
            )
            call = workers.decode_stub.Decode(decode_pb2.DecodeRequest(request=request, source=source))
            assert (await call.read()).HasField("accepted")
            await asyncio.sleep(0.05)
            await cancelled(call)
            await all_free(workers)


async def test_while_it_waits_for_the_pool(model):
    async with cluster(model, decode_options={"num_blocks": 8}) as workers:
        held = workers.decode_engine.kv_cache.allocate(6)
        request = workers.request(PROMPT, greedy(5))
        await workers.prefill_all(request)
        call = decode(workers, request, workers.ticket)
        await call.read()
        await until(lambda: workers.decode_engine.kv_cache.num_free == 0)
        await cancelled(call)
        await until(lambda: workers.decode_engine.kv_cache.num_free == 2)
        workers.decode_engine.kv_cache.release(held)
        await all_free(workers)


@pytest.mark.parametrize("with_source", [False, True])
async def test_while_it_decodes(model, with_source):
    async with cluster(model) as workers:
        gate = Gate(workers.decode_engine)
        request = workers.request(PROMPT, greedy(100))
        ticket = None
        if with_source:
            await workers.prefill_all(request)
            ticket = workers.ticket
        call = decode(workers, request, ticket)
        gate.let(5)
        while not (await call.read()).HasField("token"):
            pass
        await cancelled(call)
        gate.open()
        await all_free(workers)
        assert gate.num_steps < 20


async def test_while_it_waits_in_the_engine(model):
    async with cluster(model, decode_options={"max_num_seqs": 1}) as workers:
        gate = Gate(workers.decode_engine)
        first = decode(workers, workers.request(PROMPT, greedy(3)))
        second = decode(workers, workers.request(random_prompt(9, 2), greedy(3)))
        await until(lambda: workers.decode.worker.status().num_requests == 2)
        second.cancel()
        await until(lambda: workers.decode.worker.status().num_requests == 1)
        gate.open()
        tokens = [response.token.token_id async for response in first if response.HasField("token")]
        assert [tokens] == reference(model, [(PROMPT, greedy(3))])[0]


async def test_transfers_that_together_exceed_the_pool_all_end(model):
    """No lease deadlock: three transfers of 7 blocks each through a pool of 10."""
    work = [(random_prompt(6 * BLOCK_SIZE + 1, seed), greedy(3)) for seed in range(3)]
    expected = reference(model, work)
    async with cluster(
        model, decode_options={"num_blocks": 10}, prefill_options={"max_num_batched_tokens": 8}
    ) as workers:
        assert await asyncio.wait_for(workers.run_all(work), 30) == expected


async def test_a_request_that_meets_its_deadline_leaves_nothing(model):
    async with cluster(model) as workers:
        gate = Gate(workers.decode_engine)
        request = decode_pb2.DecodeRequest(request=workers.request(PROMPT, greedy(50)))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in workers.decode_stub.Decode(request, timeout=0.3):
                pass
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        gate.open()
        await all_free(workers)
