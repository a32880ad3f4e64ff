"""A worker gives a request up when its time is over, in whatever state it is: nobody may be left to cancel it."""

import asyncio
import socket

import grpc
import pytest

from pagewire.v1 import decode_pb2, prefill_pb2
from tests.decode_svc.harness import BLOCK_SIZE, Gate, cluster, greedy, random_prompt, until

PROMPT = random_prompt(6 * BLOCK_SIZE, 1)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


async def ended_in_time(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return caught.value.details()


async def all_free(worker, engine):
    await until(lambda: not worker.has_work)
    await until(lambda: engine.kv_cache.num_referenced == 0)
    assert not engine.has_work


@pytest.mark.parametrize("state", ["waits", "runs"])
async def test_a_request_of_the_engine(model, state):
    async with cluster(model, decode_options={"max_num_seqs": 1}) as workers:
        gate = Gate(workers.decode_engine)
        calls = []
        if state == "waits":
            calls.append(
                workers.decode_stub.Decode(decode_pb2.DecodeRequest(request=workers.request(PROMPT, greedy(90))))
            )
            await until(lambda: workers.decode.worker.load().num_waiting == 1)
        request = workers.request(PROMPT, greedy(90), timeout_ms=300)
        late = workers.decode_stub.Decode(decode_pb2.DecodeRequest(request=request))
        if state == "runs":
            gate.let(3)
        assert "0.300 s" in await ended_in_time(late)
        for call in calls:
            call.cancel()
        gate.let(4)  # by far not enough to run to its end
        await until(lambda: not workers.decode_engine.has_work)
        gate.open()
        await all_free(workers.decode.worker, workers.decode_engine)


async def test_a_request_whose_kv_does_not_come(model):
    async with cluster(model) as workers:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            source = decode_pb2.TransferSource(
                endpoint=f"127.0.0.1:{silent.getsockname()[1]}", incarnation=1, ticket=b"t" * 16
            )
            request = workers.request(PROMPT, greedy(5), timeout_ms=1000)
            call = workers.decode_stub.Decode(decode_pb2.DecodeRequest(request=request, source=source))
            await until(lambda: workers.decode.worker.load().num_waiting == 1)
            assert workers.decode.worker.load().num_queued_tokens == 1, "what a ticket brings is not to be computed"
            await ended_in_time(call)
            await all_free(workers.decode.worker, workers.decode_engine)


async def test_on_a_session_the_others_go_on(model):
    async with cluster(model) as workers:
        gate = Gate(workers.decode_engine)
        call = workers.decode_stub.Session()
        for handle, timeout_ms in ((1, 300), (2, 60_000)):
            request = workers.request(PROMPT, greedy(3), timeout_ms=timeout_ms)
            start = decode_pb2.SessionStart(handle=handle, decode=decode_pb2.DecodeRequest(request=request))
            await call.write(decode_pb2.SessionRequest(start=start))
        while not (response := await call.read()).failures:
            pass
        assert [(each.handle, each.code) for each in response.failures] == [(1, 4)]
        gate.open()
        tokens = []
        while len(tokens) < 3:
            response = await call.read()
            assert set(response.handles) <= {2}
            tokens += response.token_ids
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_a_request_that_ends_in_time_leaves_no_timer(model):
    async with cluster(model) as workers:
        request = workers.request(PROMPT, greedy(3), timeout_ms=60_000)
        assert len((await workers.decode_all(request, None))[0]) == 3
        handles = [
            h for h in asyncio.get_running_loop()._scheduled if not h.cancelled() and h.when() - h._loop.time() > 40
        ]
        assert not handles


@pytest.mark.parametrize("state", ["waits", "runs"])
async def test_prefill_ends_with_its_rpc(model, state):
    async with cluster(model, prefill_options={"max_num_seqs": 1, "max_num_batched_tokens": 4}) as workers:
        gate = Gate(workers.prefill_engine)
        first = None
        if state == "waits":
            message = prefill_pb2.PrefillRequest(request=workers.request(PROMPT, greedy(3)), hand_off=True)
            first = workers.prefill_stub.Prefill(message)
            assert (await first.read()).HasField("accepted")
        message = prefill_pb2.PrefillRequest(request=workers.request(PROMPT, greedy(3)), hand_off=True)
        late = workers.prefill_stub.Prefill(message, timeout=0.5)
        if state == "runs":
            gate.let(2)
        await ended_in_time(late)
        if first is not None:
            first.cancel()
        gate.open()
        await all_free(workers.prefill.worker, workers.prefill_engine)
        assert not len(workers.prefill.worker.leases)
